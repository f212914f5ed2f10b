"""Tests the event loop: what it runs beside long work, and events of descriptors that were closed
meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess

from pyrunc.kernel.fd import close_all
from pyrunc.shim.loop import WRITABLE, EventLoop
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
