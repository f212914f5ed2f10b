"""Tests when a pull is overdue, and which threads a cancelled pull waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cri_server.images.waiting import PROGRESS_BYTES_PER_S, Watch, in_thread
from pyrunc.errors import DeadlineExceeded

TIMEOUT_S = 300


class Clock:
    """A clock that stands still unless the test sets `now_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def overdue_after_s(
    watch: Watch, clock: Clock, bytes_per_s: int, limit_s: int = 3600
) -> int | None:
    """Report `bytes_per_s` to the watch every second; return after how many seconds it is overdue,
    or None."""
    for second in range(1, limit_s):
        clock.now_s += 1
        watch.arrived(bytes_per_s)
        if watch.is_overdue:
            return second
    return None


@pytest.mark.parametrize("bytes_per_s", [0, 1, 54, 64, 500, PROGRESS_BYTES_PER_S - 5])
def test_a_source_below_a_kibibyte_a_second_stalls(bytes_per_s: int) -> None:
    clock = Clock()
    assert overdue_after_s(Watch(TIMEOUT_S, "", clock), clock, bytes_per_s) == TIMEOUT_S + 1


@pytest.mark.parametrize("bytes_per_s", [PROGRESS_BYTES_PER_S, 10_000, 1 << 20])
def test_a_source_of_a_kibibyte_a_second_never_stalls(bytes_per_s: int) -> None:
    clock = Clock()
    assert overdue_after_s(Watch(TIMEOUT_S, "", clock), clock, bytes_per_s) is None


def test_other_progress_begins_a_new_period() -> None:
    """After progress that is not counted in bytes, the bytes received before it no longer count."""
    clock = Clock()
    watch = Watch(TIMEOUT_S, "", clock)
    watch.arrived(PROGRESS_BYTES_PER_S * TIMEOUT_S - 1)
    clock.now_s += TIMEOUT_S
    watch.touch()
    assert overdue_after_s(watch, clock, 1) == TIMEOUT_S + 1


def test_paused_work_does_not_stall() -> None:
    clock = Clock()
    watch = Watch(TIMEOUT_S, "", clock)
    with watch.paused():
        assert overdue_after_s(watch, clock, 0) is None
    assert overdue_after_s(watch, clock, 0) == TIMEOUT_S + 1


async def test_work_that_is_overdue_is_cancelled() -> None:
    clock = Clock()
    watch = Watch(0.1, "pulling app:v1", clock)
    work = asyncio.create_task(asyncio.Event().wait())
    clock.now_s = 0.2
    with pytest.raises(DeadlineExceeded, match=r"pulling app:v1: no progress for 0\.1 s"):
        await watch.guard(work)
    assert work.cancelled()


async def test_a_thread_that_must_end_outlasts_two_cancellations() -> None:
    """The lock of the pull is free only after its thread has ended. Then the cancellation is
    raised."""
    lock, begun, may_end = asyncio.Lock(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended = False

    def work() -> None:
        nonlocal ended
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(30)
        ended = True

    async def locked() -> None:
        async with lock:
            await in_thread(work, abandon_s=None)

    task = asyncio.create_task(locked())
    await begun.wait()
    try:
        # A stalled pull is cancelled by its `Watch`, and once more when its caller leaves.
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert lock.locked() and not task.done() and not ended
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended and not lock.locked()


async def test_a_thread_that_may_be_abandoned_is_abandoned_at_the_second_cancellation() -> None:
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(30)

    task = asyncio.create_task(in_thread(work, abandon_s=60))
    await begun.wait()
    try:
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(10):
                await task
    finally:
        may_end.set()
