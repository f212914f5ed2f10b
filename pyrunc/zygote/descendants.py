"""Kills a job with all its descendants, also those that have left its process group.

A job is a child subreaper, so its descendants stay below it while it lives. They are listed from
/proc and stopped, again and again until no new process appears. Then all are killed.
"""

from __future__ import annotations

import os
import signal

from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import send_signal, stat


def kill(pid: int) -> None:
    """Kill our unreaped child `pid`, its process group and all its descendants."""
    pidfds = {pid: os.pidfd_open(pid)}
    try:
        # Stopped, not killed: it forks no more, and still inherits orphans while the others die.
        send_signal(pidfds[pid], signal.SIGSTOP)
        # /proc/PID/task/TID/children is complete only while the children are stopped (Linux,
        # Documentation/filesystems/proc.rst, section 3.7), hence the rounds.
        while _stop_new(pid, pidfds):
            pass
        for number, process in pidfds.items():
            if number != pid:
                send_signal(process, signal.SIGKILL)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        send_signal(pidfds[pid], signal.SIGKILL)
    finally:
        close_all(pidfds.values())


def _stop_new(pid: int, pidfds: dict[int, int]) -> bool:
    """Stop the descendants of `pid` that are not in `pidfds` yet, and add their pidfds there.
    Return whether any was added."""
    unknown = below(pid) - set(pidfds)
    family = unknown | set(pidfds)
    stopped = False
    for descendant in unknown:
        process = open_descendant(descendant, family)
        if process is not None:
            send_signal(process, signal.SIGSTOP)
            pidfds[descendant] = process
            stopped = True
    return stopped


def open_descendant(pid: int, family: set[int]) -> int | None:
    """Return a pidfd of the process `pid`; None if its parent is not one of the pids `family`, or
    if the process has ended.

    The pid may have been reused since it was listed, so the parent is looked up after the pidfd was
    opened.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    status = stat(pid)
    if status is None or status.parent not in family:
        os.close(process)
        return None
    return process


def below(pid: int) -> set[int]:
    """Return all living descendants of `pid`, a process of the caller's pid namespace."""
    descendants: set[int] = set()
    unseen = [pid]
    while unseen:
        parent = unseen.pop()
        for child in _children(parent):
            if child not in descendants:
                descendants.add(child)
                unseen.append(child)
    return descendants


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended: its children have another parent
        return children
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                children += map(int, (file.read() or b"").split())
        except OSError:  # this thread has ended: another one has its children
            continue
    return children
