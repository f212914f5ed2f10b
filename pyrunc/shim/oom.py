"""Decides whether the OOM killer has killed a process of a container, even if the container's
cgroup is already gone.

systemd removes a scope as soon as its last process has ended, often before the shim reaps the
process, and the scope's count of kills is lost. But the kernel also adds every kill to the counts
of all ancestor cgroups, which stay. So the kills in removed cgroups are the parent's count minus
the counts of its child cgroups that exist. The shim subtracts kills from before the container's
start, and kills that it has counted for other containers. The rest belongs to this container.

The kill of any process counts, even if the container then exits with 0, as in containerd (TaskOOM)
and CRI-O (OOMKilled takes precedence over the exit code). The exit code decides only when several
removed cgroups may have had the kill.
"""

from __future__ import annotations

import os

from pyrunc.kernel import cgroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.cgroups.group import Cgroup

KILLED_CODE = 137


class KillCounts:
    """Counts the OOM killer's kills for all containers of a pod. One object serves all of them,
    because their cgroups often have the same parent."""

    def __init__(self) -> None:
        # parent -> kills in removed groups that are attributed already
        self._attributed: dict[str, int] = {}
        # group -> its kills, read while it existed
        self._counted: dict[str, int] = {}
        self._open: set[str] = set()  # groups of the pod whose kills were not counted yet

    def watch(self, group: Cgroup) -> None:
        """Begin to count OOM kills in `group`, whose processes run already. Earlier kills do not
        count if they happened in sibling cgroups that no longer exist. Raises KernelError."""
        if group.driver == "systemd":
            self._open.add(group.directory)
            parent = os.path.dirname(group.directory)
            self._attributed.setdefault(parent, _in_removed_groups(parent))

    def killed(self, group: Cgroup, exit_code: int | None) -> bool:
        """Return whether the OOM killer has ended processes of `group`. The caller must call this
        only once, at the container's end. Raises KernelError."""
        self._open.discard(group.directory)
        kills = group.oom_kills()
        if kills is not None:
            self._counted[group.directory] = kills
            return kills > 0
        parent = os.path.dirname(group.directory)
        if parent not in self._attributed:
            # no memory controller here, or a driver whose groups stay until we remove them
            return False
        in_removed = _in_removed_groups(parent)
        new_kills = in_removed - self._attributed[parent] - self._counted_in_removed_groups(parent)
        if new_kills <= 0:
            return False
        if exit_code != KILLED_CODE and self._may_be_of_another(parent):
            return False  # the kills stay for the end of the other container
        self._attributed[parent] += new_kills
        return True

    def _may_be_of_another(self, parent: str) -> bool:
        """Return whether an OOM kill that is counted in `parent` may belong to another container:

        - a container of this pod whose cgroup was removed before its kills were counted
        - a container of another pod, if pods share `parent`
        """
        if any(_is_removed(group, parent) for group in self._open):
            return True
        return not set(cgroup.children(parent)) <= self._open

    def _counted_in_removed_groups(self, parent: str) -> int:
        counted = self._counted.items()
        return sum(kills for group, kills in counted if _is_removed(group, parent))


def _is_removed(group: str, parent: str) -> bool:
    """Return whether `group` is a path directly below `parent` whose cgroup no longer exists."""
    return os.path.dirname(group) == parent and not os.path.isdir(group)


def _in_removed_groups(parent: str) -> int:
    total = _kills(parent)
    return total - sum(_kills(child) for child in cgroup.children(parent))


def _kills(directory: str) -> int:
    return cgroup.keyed(cgroup.read(directory, "memory.events")).get("oom_kill", 0)
