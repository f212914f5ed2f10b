"""The shim's event loop: calls handlers when descriptors are ready and timers are due. It has
neither threads nor asyncio, because an idle shim must cost nothing.

Readiness is level-triggered, so no handler misses an event. A handler that reads its descriptor
more than once for an event must make the descriptor non-blocking. If a descriptor is closed
and its number is used again, the new descriptor's handler gets no event of the old descriptor.
"""

from __future__ import annotations

import heapq
import select
import sys
import time

from pyrunc.errors import Error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    from pyrunc.shim.reaper import Reaper

    Handler = Callable[[int], None]

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
BROKEN = select.EPOLLERR | select.EPOLLHUP
LONGEST_WAIT_S = 86_400.0  # epoll_wait(2) counts milliseconds in an int; a timer may be years away


class Timer:
    """A function that the loop calls once, at the time `at` of the monotonic clock, in seconds."""

    __slots__ = ("at", "function")

    def __init__(self, at: float, function: Callable[[], None]) -> None:
        self.at = at
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Cancel the timer, so that its function is not called."""
        self.function = None

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


class EventLoop:
    """Calls handlers when descriptors are ready (epoll(7)), and functions when timers are due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._timers: list[Timer] = []
        self._stopped = False

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call `handler(events)` when `fd` is ready for one of `events`. Errors and hang-ups are
        always reported."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`. Does nothing if `fd` is not watched. Every watched descriptor must be
        unwatched before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            # close(2) alone does not remove it while a dup or a fork has the file open (epoll(7),
            # Q6).
            self._epoll.unregister(fd)

    def after(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Call `function()` once, `delay_s` from now."""
        timer = Timer(time.monotonic() + delay_s, function)
        heapq.heappush(self._timers, timer)
        return timer

    def spread(
        self, steps: Generator[None, None, None], on_end: Callable[[Exception | None], None]
    ) -> None:
        """Run the first step of `steps` now and one further step in each turn of the loop. After
        the last, call `on_end` with the exception that a step has raised, or with None."""
        try:
            next(steps)
        except StopIteration:
            on_end(None)
        except Exception as error:
            on_end(error)
        else:
            self.after(0, lambda: self.spread(steps, on_end))

    def stop(self) -> None:
        """Leave `run` after the current round."""
        self._stopped = True

    def run(self) -> None:
        """Serve until `stop`. A handler that fails is reported on stderr and does not end the
        loop."""
        while not self._stopped:
            self.turn()

    def turn(self) -> None:
        """Wait until a descriptor is ready or a timer is due, then call the handlers and the
        functions of due timers."""
        handlers = self._handlers
        ready = [(fd, events, handlers.get(fd)) for fd, events in self._epoll.poll(self._wait_s())]
        for fd, events, handler in ready:
            # An earlier handler of this round may have closed the descriptor. Another descriptor
            # may have got its number, and would be read in vain.
            if handler is not None and handlers.get(fd) is handler:
                _guarded(handler, events)
        now = time.monotonic()  # read once: a timer that is set meanwhile belongs to the next turn
        while self._timers and self._timers[0].at <= now:
            function = heapq.heappop(self._timers).function
            if function is not None:
                _guarded(function)

    def _wait_s(self) -> float | None:
        # A cancelled timer stays in the heap until it is on top: removal from the middle would
        # search the whole list.
        while self._timers and self._timers[0].function is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0].at - time.monotonic()), LONGEST_WAIT_S)


class LaunchSteps:
    """Carries out a launch in steps between other work.

    - `steps`: a generator that yields each descriptor to wait for
    - `on_done`: is called with the generator's result
    - `on_failed`: is called with the generator's exception

    The steps run in the shim itself, not in a fork: an exec takes 1.1 ms of CPU in the shim, and
    2.8 ms in a fork, which copies 550 pages (measured). Each run of an exec probe
    has this cost.
    """

    def __init__(
        self,
        loop: EventLoop,
        reaper: Reaper,
        steps: Generator[int, None, Any],
        on_done: Callable[[Any], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._loop, self._reaper, self._steps = loop, reaper, steps
        self._on_done, self._on_failed = on_done, on_failed
        self._waiting_for = -1
        reaper.hold()
        self._next(0)

    def kill(self) -> None:
        """End the launch: undo its steps, kill the process and call `on_failed`."""
        self._unwatch()
        self._steps.close()
        self._finish(self._on_failed, Error("the process was killed before it ran"))

    def _next(self, events: int) -> None:
        self._unwatch()
        try:
            self._waiting_for = next(self._steps)
        except StopIteration as end:
            self._finish(self._on_done, end.value)
        except Exception as error:
            self._finish(self._on_failed, error)
        else:
            self._loop.watch(self._waiting_for, READABLE, self._next)

    def _unwatch(self) -> None:
        if self._waiting_for >= 0:
            self._loop.unwatch(self._waiting_for)
            self._waiting_for = -1

    def _finish(self, callback: Callable[[Any], None], outcome: Any) -> None:
        try:
            callback(outcome)
        finally:
            self._reaper.let_go()


def _guarded(function: Callable[..., None], *arguments: int) -> None:
    try:
        function(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())
