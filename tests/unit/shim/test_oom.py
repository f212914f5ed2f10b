"""Tests that the OOM killer's kills are attributed to containers whose cgroups have been removed
already. The kernel's own counts are in tests/vm/inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrunc.cgroups.group import Cgroup
from pyrunc.kernel import cgroup as tree
from pyrunc.shim.oom import KillCounts

PARENT = "kubepods-pod1.slice"


class Groups:
    """A folder in the place of the cgroup tree, with the memory.events files that `KillCounts`
    reads."""

    def __init__(self, root: Path) -> None:
        self.parent = root / PARENT
        self.parent.mkdir()
        self.kills = 0
        self._count(self.parent, 0)

    def add(self, name: str) -> Cgroup:
        folder = self.parent / name
        folder.mkdir()
        self._count(folder, 0)
        return Cgroup(f"/{PARENT}/{name}", "systemd", PARENT, name)

    def kill_in(self, group: Cgroup) -> None:
        """Count one killed process in the group and in every group above, as the kernel does."""
        self.kills += 1
        self._count(self.parent, self.kills)
        folder = Path(group.directory)
        count = int((folder / "memory.events").read_text().split()[1])
        self._count(folder, count + 1)

    def remove(self, group: Cgroup) -> None:
        """Remove the group, as systemd removes an empty scope."""
        folder = Path(group.directory)
        (folder / "memory.events").unlink()
        folder.rmdir()

    @staticmethod
    def _count(folder: Path, kills: int) -> None:
        (folder / "memory.events").write_text(f"oom_kill {kills}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr(tree, "_root", str(tmp_path))
    return Groups(tmp_path)


OOM, OTHER = "OOMKilled", "Error or Completed"
KILLED_CHILD = [
    # exit code, and the reason of containerd 2.4 (internal/cri/server/events.go: TaskOOM of any
    # process, from inotify on memory.events in its shim), of CRI-O (server/container_status.go:
    # conmon's file before the exit code) and ours. Since Kubernetes 1.28 kubelet sets
    # memory.oom.group, unless singleProcessOOMKill: then all processes are killed.
    (0, OOM, OOM, OOM),
    (1, OOM, OOM, OOM),
    (137, OOM, OOM, OOM),
]
NO_KILL = [(0, OTHER, OTHER, OTHER), (137, OTHER, OTHER, OTHER)]


@pytest.mark.parametrize(("code", "containerd", "crio", "ours"), NO_KILL)
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_container_without_a_kill_was_not_oom_killed(
    groups: Groups, code: int, containerd: str, crio: str, ours: str, is_gone: bool
) -> None:
    """The exit code 137 alone does not count: any SIGKILL causes it."""
    counts, container = KillCounts(), groups.add("c")
    counts.watch(container)
    if is_gone:
        groups.remove(container)
    assert (OOM if counts.killed(container, code) else OTHER) == ours == containerd == crio


@pytest.mark.parametrize(("code", "containerd", "crio", "ours"), KILLED_CHILD)
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_killed_child_counts_with_any_exit_code(
    groups: Groups, code: int, containerd: str, crio: str, ours: str, is_gone: bool
) -> None:
    counts, pause, container = KillCounts(), groups.add("pause"), groups.add("c")
    counts.watch(pause)
    counts.watch(container)
    groups.kill_in(container)
    if is_gone:
        groups.remove(container)
    assert (OOM if counts.killed(container, code) else OTHER) == ours == containerd == crio
    second = groups.add("c2")
    counts.watch(second)
    if is_gone:
        groups.remove(second)
    assert not counts.killed(second, 137), "the first one's kill is not the next one's"


def test_of_two_removed_cgroups_the_exit_code_tells_which_had_the_kill(groups: Groups) -> None:
    """The order in which the containers end plays no role."""
    for order in (0, 1):
        counts = KillCounts()
        killed, other = groups.add("a"), groups.add("b")
        for group in (killed, other):
            counts.watch(group)
        groups.kill_in(killed)
        for group in (killed, other):
            groups.remove(group)
        ends = [(killed, 137, True), (other, 0, False)]
        for group, code, expected in ends[::-1] if order else ends:
            assert counts.killed(group, code) == expected


def test_a_kill_below_a_shared_parent_may_be_another_pods(groups: Groups) -> None:
    """A kill below the parent cgroup counts for a container only if the container's exit code is
    that of a kill."""
    counts, container, other = KillCounts(), groups.add("c"), groups.add("of-another-pod")
    groups.add("pause-of-another-pod")
    counts.watch(container)
    groups.kill_in(other)
    for group in (other, container):
        groups.remove(group)
    assert not counts.killed(container, 0)
