"""Whether the OOM killer took processes of a container, also when its cgroup went before we could
look.

systemd removes a scope as soon as its last process has ended, often before the process is reaped,
and the scope's count goes with it. The parent's count stays: the kernel adds every kill to all
groups above. So what the parent counts beyond the sum of the groups that are left was killed in
groups that are gone; what of that is not news at a container's end is ours.

Any kill counts, also of a child whose container then ended with 0, as in containerd (TaskOOM) and
CRI-O (OOMKilled takes precedence over the exit code). The exit code decides only if another group
may be the one that is gone.
"""

from __future__ import annotations

import os

from pyrunc.kernel import cgroup as tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.cgroups.group import Cgroup

KILLED_CODE = 137


class KillCounts:
    """One for all containers of a pod: they often share the parent."""

    def __init__(self) -> None:
        self._explained: dict[
            str, int
        ] = {}  # parent -> kills in groups that are gone, as far as we know whose
        self._counted: dict[str, int] = {}  # group -> kills that were read while it was there
        self._open: set[str] = set()  # groups of the pod whose kills were not counted yet

    def watch(self, group: Cgroup) -> None:
        """Begin to count for `group`, which has processes: note the earlier kills beside it. Raises
        KernelError."""
        if group.driver == "systemd":
            self._open.add(group.directory)
            parent = os.path.dirname(group.directory)
            self._explained.setdefault(parent, _in_groups_gone(parent))

    def killed(self, group: Cgroup, exit_code: int | None) -> bool:
        """Whether the OOM killer ended processes of `group`; called once, at the container's end.
        Raises KernelError."""
        self._open.discard(group.directory)
        kills = group.oom_kills()
        if kills is not None:
            self._counted[group.directory] = kills
            return kills > 0
        parent = os.path.dirname(group.directory)
        if parent not in self._explained:
            # no memory controller here, or a driver whose groups stay until we remove them
            return False
        gone = _in_groups_gone(parent)
        news = gone - self._explained[parent] - self._counted_in_groups_gone(parent)
        if news <= 0:
            return False
        if exit_code != KILLED_CODE and self._others_may_be_gone(parent):
            return False  # the news stay for the end of the other one
        self._explained[parent] += news
        return True

    def _others_may_be_gone(self, parent: str) -> bool:
        """Whether another group below `parent` may be the one in which a process was killed: one of
        the pod that is gone too, or another pod's, where pods share the parent."""
        gone = [
            each
            for each in self._open
            if os.path.dirname(each) == parent and not os.path.isdir(each)
        ]
        return bool(gone) or not set(tree.children(parent)) <= self._open

    def _counted_in_groups_gone(self, parent: str) -> int:
        return sum(
            kills
            for group, kills in self._counted.items()
            if os.path.dirname(group) == parent and not os.path.isdir(group)
        )


def _in_groups_gone(parent: str) -> int:
    total = _kills(parent)
    return total - sum(_kills(child) for child in tree.children(parent))


def _kills(directory: str) -> int:
    return tree.keyed(tree.read(directory, "memory.events")).get("oom_kill", 0)
