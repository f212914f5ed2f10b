"""Finds and kills the processes of an exec session.

A process of the container's cgroup is a member of the exec session if it is the exec's first
process (the leader), or if one of these is a member:

- its parent
- the process that created its session (setsid(2))

Each member is killed through a pidfd, after a check of its start time. So a later process with the
same pid is never signalled. The walk is repeated until it finds no new member, because a process
may have forked before it was killed.
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
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

MOST_ROUNDS = 1000
READS_PER_STEP = 100  # 2 ms


def kill_session(
    leader: int, start_time: int, processes: Callable[[], Sequence[int]]
) -> Generator[None, None, None]:
    """Kill the session of `leader` and all descendants of its members, in short steps. Raises Error
    if new processes appear faster than they can be killed.

    - `start_time`: the leader's start time. If another process has the leader's pid by now,
      nothing is killed, because the kernel reuses the pid only after the end of all members.
    - `processes()`: lists the container's processes anew

    The leader is killed first, so that it does not see its children die.
    """
    # pid -> start time: a process that was killed is still listed for a moment
    done: dict[int, int] = {}
    for _ in range(MOST_ROUNDS):
        statuses: dict[int, Stat] = {}
        for pids in _portions(processes()):
            statuses |= _statuses(pids)
            yield
        # Another process may have got the pid of one that has ended.
        for pid in [p for p, at in done.items() if p in statuses and statuses[p].start_time != at]:
            del done[pid]
        # A pid is free again only when no task has it as its session (kernel/pid.c, __change_pid).
        # So if another process has the leader's pid, no member is left.
        present = stat(leader)  # looked up after the list was made
        if present is not None and present.start_time != start_time:
            return
        members = [pid for pid in _members(leader, statuses, done) if pid not in done]
        if not members:
            return
        # The leader first: a shell that waits for its children would end with code 0 before its
        # turn.
        for pids in _portions(sorted(members, key=lambda pid: pid != leader)):
            for pid in pids:
                # Also if it has ended meanwhile: it may have made a child after the list was made.
                _kill(pid, statuses[pid].start_time)
                done[pid] = statuses[pid].start_time
            yield
    raise Error(f"processes of the session of {leader} appear faster than they can be killed")


def orphaned_sessions(first: int, processes: Iterable[int]) -> dict[int, int]:
    """Return the leaders of the exec sessions whose shim has ended: a dict, pid -> start time.

    - `first`: the container's first process
    - `processes`: all pids of the container

    Such a leader has a parent outside the container's pid namespace that is not this shim. If the
    container uses the host's pid namespace, return an empty result, because there such a leader
    looks like any other orphan.
    """
    own = _pid_namespace(os.getpid())
    if _pid_namespace(first) in (own, ""):
        return {}
    return {
        pid: status.start_time
        for pid, status in _statuses(processes).items()
        # 0: the parent is outside this shim's pid namespace.
        if pid != first
        and status.parent not in (0, os.getpid())
        and _pid_namespace(status.parent) == own
    }


def _portions(pids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the pids in lists of READS_PER_STEP."""
    for start in range(0, len(pids), READS_PER_STEP):
        yield pids[start : start + READS_PER_STEP]


def _statuses(pids: Iterable[int]) -> dict[int, Stat]:
    """Return a dict: pid -> content of /proc/PID/stat, for those of `pids` that exist."""
    statuses = {pid: stat(pid) for pid in pids}
    return {pid: status for pid, status in statuses.items() if status is not None}


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _members(leader: int, statuses: Mapping[int, Stat], killed: Iterable[int]) -> list[int]:
    """Return the living processes of `statuses` that are members of the exec session.

    The processes `killed` count as members. So a child that such a process made just before its
    death is found: it has another parent by now, but still the setsid(2) session of a member.
    """
    below: dict[int, list[int]] = {}
    for pid, status in statuses.items():
        below.setdefault(status.parent, []).append(pid)
        below.setdefault(status.session, []).append(pid)
    members: set[int] = set()
    unseen = [leader, *killed]
    while unseen:
        pid = unseen.pop()
        if pid not in members:
            members.add(pid)
            unseen += below.get(pid, ())
    return [pid for pid in members if pid in statuses and statuses[pid].alive]


def _kill(pid: int, start_time: int) -> None:
    # The pidfd is opened before the start time is compared: a reused number gets no signal.
    pidfd = open_pidfd(pid, start_time)
    if pidfd is not None:
        with closing_fd(pidfd):
            send_signal(pidfd, SIGKILL)
