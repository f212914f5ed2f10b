"""Tests the event loop: what it runs beside long work, and events of descriptors that were closed
meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess

from pyrunc.kernel.fd import close_all
from pyrunc.shim.loop import READABLE, WRITABLE, EventLoop
from pyrunc.shim.tree import READS_PER_STEP, kill_session, stat


def test_the_loop_serves_others_while_a_session_is_killed() -> None:
    loop = EventLoop()
    ended: list[Exception | None] = []
    served: list[int] = []
    ends = os.pipe()
    loop.watch(ends[1], WRITABLE, served.append)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as leader:
        status = stat(leader.pid)
        assert status is not None
        processes = [leader.pid] * 10 * READS_PER_STEP
        loop.spread(kill_session(leader.pid, status.start_time, lambda: processes), ended.append)
        while not ended:
            loop.turn()
    assert ended == [None] and leader.returncode == -signal.SIGKILL
    assert len(served) > 10
    close_all(ends)


def test_an_event_of_a_closed_descriptor_does_not_reach_its_successor() -> None:
    """When a handler closes another descriptor and its number is reused, a pending event of the old
    descriptor does not call the new handler."""
    loop = EventLoop()
    first, second, successor = os.pipe(), os.pipe(), os.pipe()
    called: list[str] = []

    def replace(events: int) -> None:
        loop.unwatch(first[0])
        loop.unwatch(second[0])
        os.dup2(successor[0], second[0])
        loop.watch(second[0], READABLE, lambda events: called.append("successor"))
        called.append("first")

    loop.watch(first[0], READABLE, replace)
    loop.watch(second[0], READABLE, lambda events: called.append("second"))
    close_all((first[1], second[1]))
    loop.turn()
    assert called == ["first"]
    os.write(successor[1], b"x")
    loop.turn()
    assert called == ["first", "successor"]
    close_all((first[0], second[0], *successor))
