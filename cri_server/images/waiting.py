"""Runs blocking work in threads that can be abandoned, and cancels work that makes no progress."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from cri_server.operations.tasks import wait_through_cancellation
from pyrunc.errors import DeadlineExceeded

Outcome = TypeVar("Outcome")
_ABANDON_S = 5.0
# A slower source has stalled. A modem of 9,600 bit/s sends 1.2 KiB/s, and at 1 KiB/s a layer of
# 30 MiB takes more than eight hours, so no useful pull is slower.
PROGRESS_BYTES_PER_S = 1 << 10


class Abandoned(Exception):
    """Raised in a thread to end work that was cancelled."""


async def in_thread(
    function: Callable[[], Outcome],
    abort: Callable[[], None] = lambda: None,
    abandon_s: float | None = _ABANDON_S,
) -> Outcome:
    """Run `function` in its own daemon thread; return its result. A thread that hangs in the kernel
    delays neither other work nor the exit of the process.

    When the caller is cancelled, call `abort`, which should make the function return soon. Then
    wait at most `abandon_s` for the end of the function (None: without limit).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def run() -> None:
        report: Callable[[], None]
        try:
            report = partial(future.set_result, function())
        except StopIteration as stop:  # a future cannot hold a StopIteration
            report = partial(future.set_exception, RuntimeError(f"StopIteration: {stop}"))
        except BaseException as error:
            report = partial(future.set_exception, error)
        try:
            loop.call_soon_threadsafe(report)
        except RuntimeError:  # the loop was closed meanwhile
            pass

    threading.Thread(target=run, name="images", daemon=True).start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        abort()
        if abandon_s is None:
            await wait_through_cancellation(future)
        else:
            await asyncio.wait([future], timeout=abandon_s)
        # asyncio would log an exception that was never retrieved.
        if future.done() and not future.cancelled():
            future.exception()
        raise


class Watch:
    """Cancels the task that `guard` waits for when the task makes no progress for `timeout_s`.
    Progress is reported with `touch`, from any thread, or `arrived`, only on the event loop."""

    def __init__(
        self, timeout_s: float, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s`: the longest time without progress. `what`: the work, for the error message,
        such as `pulling IMAGE`. `clock`: returns seconds, as `time.monotonic` does."""
        self._timeout_s, self._what, self._clock = timeout_s, what, clock
        self._last = clock()
        self._pauses = 0
        self._arrived_bytes = 0  # since the last progress
        self.stalled = False

    def touch(self) -> None:
        """Record progress."""
        self._last, self._arrived_bytes = self._clock(), 0

    def arrived(self, size: int) -> None:
        """Count received bytes. Records progress when PROGRESS_BYTES_PER_S * `timeout_s` bytes have
        arrived since the last progress."""
        self._arrived_bytes += size
        if self._arrived_bytes >= PROGRESS_BYTES_PER_S * self._timeout_s:
            self.touch()

    @property
    def is_overdue(self) -> bool:
        """Return whether the last progress is longer ago than the timeout."""
        return not self._pauses and self._clock() - self._last > self._timeout_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during the `with` block. Meant for a block that waits for other work or
        for the disk."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self.touch()

    async def guard(self, work: asyncio.Task[Outcome]) -> Outcome:
        """Wait for the task `work`, and return its result. Cancels `work` and raises
        DeadlineExceeded when `work` makes no progress. Also cancels `work` when the caller is
        cancelled."""
        try:
            while not work.done():
                await asyncio.wait([work], timeout=min(1.0, self._timeout_s / 4))
                if self.is_overdue and not work.done():
                    self.stalled = True
                    work.cancel()
                    await asyncio.wait([work])
                    break
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait([work])
            raise
        if self.stalled and (work.cancelled() or work.exception() is not None):
            raise DeadlineExceeded(f"{self._what}: no progress for {self._timeout_s:g} s")
        return work.result()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that made a task group cancel its other tasks: the first error in the group,
    also if the groups are nested."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
