"""Every child's end arrives here: the pod's processes by pid, and the orphans that a subreaper inherits."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.shim.loop import Loop

    OnExit = Callable[["Ended"], None]


class Ended:
    """A process that has ended: `exit_code` is 128 + n when signal n ended it."""

    __slots__ = ("exit_code", "pid", "signal")

    def __init__(self, pid: int, exit_code: int, signal: int | None) -> None:
        self.pid, self.exit_code, self.signal = pid, exit_code, signal


class Reaper:
    """Waits for all children, only between handlers: what starts a process may wait for helpers of its own meanwhile."""

    def __init__(self, loop: Loop) -> None:
        self._expected: dict[int, OnExit] = {}
        self._unclaimed: dict[int, Ended] = {}
        self._holds = 0
        self._notice, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        loop.watch(self._notice, 1, self._ready)

    def expect(self, pid: int, on_exit: OnExit) -> None:
        """Call `on_exit` once when our child `pid` has ended, now if it was reaped since `hold`."""
        ended = self._unclaimed.pop(pid, None)
        if ended:
            on_exit(ended)
        else:
            self._expected[pid] = on_exit

    def hold(self) -> None:
        """Keep the ends of unknown children until `let_go`: one of them may be expected soon. Nests."""
        self._holds += 1

    def let_go(self) -> None:
        """Nobody will ask for them any more."""
        self._holds -= 1
        if not self._holds:
            self._unclaimed.clear()

    def _ready(self, events: int) -> None:
        try:
            os.read(self._notice, 4096)
        except BlockingIOError:
            pass
        while ended := _next():
            on_exit = self._expected.pop(ended.pid, None)
            if on_exit is not None:
                on_exit(ended)
            elif self._holds:
                self._unclaimed[ended.pid] = ended


def _next() -> Ended | None:
    """Reap one child that has ended; None if there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if found is None:
        return None
    by_exit = found.si_code == os.CLD_EXITED
    return Ended(
        found.si_pid,
        found.si_status if by_exit else 128 + found.si_status,
        None if by_exit else found.si_status,
    )


def _nothing(number: int, frame: object) -> None:
    """A handler must exist for the wakeup descriptor to be written."""
