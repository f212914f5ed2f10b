"""Decides whether the OOM killer has killed a process of a container, even if the container's
cgroup is already gone.

systemd removes a scope as soon as its last process has ended, often before the shim reaps the
process, and the scope's count of kills is lost. The parent's count stays, because the kernel adds
every kill to all groups above. The parent's count minus the counts of the groups that still exist
is therefore the number of kills in removed groups. Kills from before, and those that were counted
for other containers, are subtracted; the rest belongs to this one.

Any kill counts, also of a child whose container then ended with 0, as in containerd (TaskOOM) and
CRI-O (OOMKilled takes precedence over the exit code). The exit code decides only when several
removed groups may have had the kill.
"""

from __future__ import annotations

import os

from pyrunc.kernel import cgroup as tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.cgroups.group import Cgroup

KILLED_CODE = 137


class KillCounts:
    """Counts the OOM killer's kills for all containers of a pod, because their groups often have
    the same parent."""

    def __init__(self) -> None:
        # parent -> kills in removed groups that are attributed already
        self._explained: dict[str, int] = {}
        # group -> its kills, read while it existed
        self._counted: dict[str, int] = {}
        self._open: set[str] = set()  # groups of the pod whose kills were not counted yet

    def watch(self, group: Cgroup) -> None:
        """Begin to count for `group`, which has processes: note the earlier kills in removed groups
        beside it. Raises KernelError."""
        if group.driver == "systemd":
            self._open.add(group.directory)
            parent = os.path.dirname(group.directory)
            self._explained.setdefault(parent, _in_groups_gone(parent))

    def killed(self, group: Cgroup, exit_code: int | None) -> bool:
        """Tell whether the OOM killer ended processes of `group`. To be called once, at the
        container's end. Raises KernelError."""
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
        """Tell whether the kill may belong to another group below `parent`: a removed one of this
        pod, or one of another pod, if pods share the parent."""
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
