"""Stops a container: sends the signal once, waits until the earliest deadline of all callers, then
sends SIGKILL until the container has exited.

The shim does this also when the server has ended. SIGKILL is repeated, because the container may
have been frozen, or a process may just have been entering the cgroup.
"""

from __future__ import annotations

import time

from pyrunc.errors import DeadlineExceeded, Error
from pyrunc.shim import tree
from pyrunc.shim.warn import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.shim.loop import EventLoop, Timer
    from pyrunc.shim.serve import ShimCall
    from pyrunc.shim.session import SupervisedContainer

KILL_AGAIN_S = 0.25
UNKILLABLE_AFTER_S = 2.0


class ContainerStop:
    """The stop of one container. The first request begins it; later requests join it."""

    def __init__(self, loop: EventLoop, container: SupervisedContainer) -> None:
        self._loop, self._container = loop, container
        self._deadline: float | None = None
        self._timer: Timer | None = None
        self._waiting: list[ShimCall] = []
        self._signalled = False
        self._killed_at: float | None = None

    def request(self, call: ShimCall, number: int, timeout_s: float) -> None:
        """Stop the container, and answer `call` when it has exited. The first request sends signal
        `number`. SIGKILL follows at the earliest deadline of all requests; a request's deadline is
        `timeout_s` after its arrival.

        A timeout of 0 means SIGKILL at once, without the signal.
        """
        self._waiting.append(call)
        # As in containerd: a timeout of 0 is SIGKILL at once, without the stop signal.
        if timeout_s > 0 and not self._signalled:
            self._signalled = True
            # Often without effect: the kernel drops it if the first process of a pid namespace has
            # no handler for it (pid_namespaces(7)). SIGKILL at the deadline is then the way out.
            self._container.send_signal(number)
        at = time.monotonic() + max(0.0, timeout_s)
        # As under CRI-O, a later stop can shorten the time, but not prolong it.
        if self._killed_at is None and (self._deadline is None or at < self._deadline):
            self._deadline = at
            self._later(at - time.monotonic(), self._kill)

    def exited(self) -> None:
        """Answer all waiting stop calls with the exit. Called when exit.json is written."""
        if self._timer:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.answer(self._container.exited())

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        if self._timer:
            self._timer.cancel()
        if delay_s <= 0:
            function()
        else:
            self._timer = self._loop.after(delay_s, function)

    def _kill(self) -> None:
        now = time.monotonic()
        self._killed_at = self._killed_at or now
        try:
            self._container.kill()
        except (Error, OSError) as error:  # the next attempt may succeed
            warn(f"container {self._container.id}: cannot kill all its processes: {error}")
        if now - self._killed_at > UNKILLABLE_AFTER_S:
            self._give_up()
        self._later(KILL_AGAIN_S, self._kill)

    def _give_up(self) -> None:
        """Answer all waiting stop calls with the error that the container survives SIGKILL. SIGKILL
        is still repeated."""
        waiting, self._waiting = self._waiting, []
        status = tree.stat(self._container.pid)
        state = status.state if status else "gone"
        process = f"process {self._container.pid} (state {state})"
        words = f"container {self._container.id}: {process} survives SIGKILL"
        for call in waiting:
            call.fail(DeadlineExceeded(words))
