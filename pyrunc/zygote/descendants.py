"""Killing an errand means killing what it started, also what left its process group.

An errand is a child subreaper, so whatever its children leave behind stays below it while it lives: the tree is read from
/proc, stopped from the top, and read again until nothing new is found.
"""

from __future__ import annotations

import os
import signal


def kill(pid: int) -> None:
    """SIGKILL for our own unreaped child `pid`, its process group and all its descendants."""
    known = {pid}
    _signal(pid, signal.SIGSTOP)  # it forks no more and keeps inheriting orphans while the others die
    while found := below(pid) - known:
        for descendant in found:
            _signal(descendant, signal.SIGSTOP)
        known |= found
    for descendant in known - {pid}:
        _signal(descendant, signal.SIGKILL)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _signal(pid, signal.SIGKILL)


def below(pid: int) -> set[int]:
    """Every living descendant of `pid` (a process of the caller's pid namespace)."""
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        parent = unseen.pop()
        for child in _children(parent):
            if child not in found:
                found.add(child)
                unseen.append(child)
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended: its children are somebody else's now
        return children
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                children += map(int, (file.read() or b"").split())
        except OSError:  # this thread has ended: another one has its children
            continue
    return children


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
