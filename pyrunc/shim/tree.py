"""Finds and kills the processes of an exec session.

A process of the container's cgroup is a member if one of these holds:

- it is in the session
- its parent is a member
- it is in another session, whose leader is a member

Each member is killed through a pidfd, whose process must have the member's start time. So a process
that has got the pid of a member is never signalled. The walk is repeated until it finds no new
member, because a process may have forked before it was killed.
"""

from __future__ import annotations

import os

# not from `signal`, which imports enum
from _signal import SIGKILL  # type: ignore[import-not-found]

from pyrunc.errors import Error
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import Stat as Stat
from pyrunc.kernel.process import open_pidfd, send_signal
from pyrunc.kernel.process import stat as stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MOST_ROUNDS = 1000


def kill_session(leader: int, reaped: bool, processes: Callable[[], Iterable[int]]) -> int:
    """Kill the session of `leader` and all descendants of its members; return how many processes
    got the signal. Raises Error if new processes appear faster than they can be killed.

    - `reaped`: the leader was reaped already. If a process has the leader's pid again, nothing is
      killed: the kernel reuses the pid only after the session's last member has ended.
    - `processes()`: lists the container's processes anew

    The leader is killed first, so that it does not see its children die.
    """
    # pid -> start time: a process that was killed is still listed for a moment
    done: dict[int, int] = {}
    for _ in range(MOST_ROUNDS):
        killed = 0
        members = _members(leader, processes(), set(done))
        # A number is free again only when no task has it as its session (kernel/pid.c,
        # __change_pid), so a living process of this number proves that no member is left.
        if reaped and stat(leader):  # looked up after the list was made
            return len(done)
        # A shell that waits for its children would otherwise end with code 0 before its turn.
        for pid, status in sorted(members.items(), key=lambda member: member[0] != leader):
            if done.get(pid) != status.start_time and _kill(pid, status.start_time):
                done[pid] = status.start_time
                killed += 1
        if not killed:
            return len(done)
    raise Error(f"processes of the session of {leader} appear faster than they can be killed")


def orphaned_sessions(first: int, processes: Iterable[int]) -> list[int]:
    """Return the pids of the leaders of exec sessions whose shim was lost.

    - `first`: the container's first process
    - `processes`: all pids of the container

    A leader's parent is outside the container's pid namespace and is not this shim. In the host's
    pid namespace every orphan has such a parent, so the result is then [].
    """
    own = _pid_namespace(os.getpid())
    if _pid_namespace(first) in (own, ""):
        return []
    parents = {pid: status.parent for pid, status in _statuses(processes).items() if pid != first}
    return [
        pid
        for pid, parent in parents.items()
        # 0: the parent is outside this shim's pid namespace.
        if parent not in (0, os.getpid()) and _pid_namespace(parent) == own
    ]


def _statuses(pids: Iterable[int]) -> dict[int, Stat]:
    """Return pid -> content of /proc/PID/stat for those of `pids` that exist."""
    statuses = {pid: stat(pid) for pid in pids}
    return {pid: status for pid, status in statuses.items() if status is not None}


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _members(leader: int, pids: Iterable[int], killed: set[int]) -> dict[int, Stat]:
    """Return the living processes of `pids` that are members of the session: processes in it,
    children of members, and processes in another session whose leader is a member.

    Killed processes count as members, because a child that they made in their last moment has
    another parent by now.
    """
    statuses = _statuses(pids)
    members = {leader} | killed
    while (
        more := {p for p, f in statuses.items() if f.parent in members or f.session in members}
        - members
    ):
        members |= more
    return {pid: statuses[pid] for pid in members if pid in statuses and statuses[pid].alive}


def _kill(pid: int, start_time: int) -> bool:
    # The pidfd is opened before the start time is compared: a reused number gets no signal.
    pidfd = open_pidfd(pid, start_time)
    if pidfd is None:
        return False
    with closing_fd(pidfd):
        return send_signal(pidfd, SIGKILL)
