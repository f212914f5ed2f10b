"""Tests slow transfer rates, callers that share the work of the first caller, and the fair division
of streams among registries."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from cri_server.images.layers import sharing
from cri_server.images.layers.ring import Interrupted
from cri_server.images.layers.sharing import FAST_BYTES, Rate, SharedWork, StreamLimiter, StreamTurn
from cri_server.images.waiting import Watch

WATCH = Watch(60, "test")


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sharing, "time", clock)
    return clock


def test_a_rate_is_slow_after_too_few_bytes_for_too_long(clock: Clock) -> None:
    rate = Rate()
    clock.now += sharing.SLOW_S
    assert not rate.is_slow
    rate.arrived(FAST_BYTES - 1)
    clock.now += 0.1
    assert rate.is_slow
    rate.arrived(1)
    assert not rate.is_slow
    clock.now += sharing.SLOW_S + 1
    rate.arrived(-FAST_BYTES)  # what was taken back is no progress
    assert rate.is_slow
    with rate.node_work():
        assert not rate.is_slow
    assert not rate.is_slow


async def test_callers_wait_for_fast_work_of_the_first_caller() -> None:
    work, running, most = SharedWork(), 0, 0

    async def take() -> None:
        nonlocal running, most
        async with work.turn("key", Rate(), WATCH):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(take() for _ in range(20)))
    assert most == 1 and not work._rates and not work._ended


async def test_callers_do_not_wait_for_slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SLOW_S", 0.02)
    work = SharedWork()
    async with work.turn("key", Rate(), WATCH), asyncio.timeout(10):
        async with work.turn("other key", Rate(), WATCH):
            pass
        async with work.turn("key", Rate(), WATCH):
            pass
    assert not work._rates


async def test_the_registry_with_the_fewest_streams_gets_the_next_turn() -> None:
    streams = StreamLimiter(2)
    order: list[str] = []

    async def take(origin: str) -> None:
        async with streams.hold(StreamTurn(origin, Rate()), WATCH):
            order.append(origin)

    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(streams.hold(StreamTurn("a", Rate()), WATCH))
        tasks = [asyncio.create_task(take(origin)) for origin in ("a", "a", "b")]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["b", "a", "a"]
    assert not streams._active and not streams._waiters


async def test_a_stream_without_a_turn_in_time_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "STREAM_WAIT_S", 0.01)
    streams = StreamLimiter(1)
    requests: list[str] = []
    slow, rate = StreamTurn("a", Rate()), Rate()
    slow.give_way = lambda: requests.append("slow")
    async with streams.hold(slow, WATCH):
        with pytest.raises(Interrupted):
            async with streams.hold(StreamTurn("b", rate), WATCH):
                pass
        assert requests == []
        monkeypatch.setattr(sharing, "SLOW_S", -1.0)
        with pytest.raises(Interrupted):
            async with streams.hold(StreamTurn("b", rate), WATCH):
                pass
        assert requests == ["slow"]
    assert not streams._active and not streams._waiters


async def test_a_stream_waits_while_other_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other streams end, a stream waits for its turn longer than STREAM_WAIT_S. After
    STREAM_WAIT_LIMIT_S it is interrupted."""
    monkeypatch.setattr(sharing, "STREAM_WAIT_S", 1.0)
    streams, ended = StreamLimiter(1), 0

    async def take(duration_s: float) -> None:
        nonlocal ended
        async with streams.hold(StreamTurn("a", Rate()), WATCH):
            await asyncio.sleep(duration_s)
            ended += 1

    await asyncio.gather(*(take(0.15) for _ in range(10)))
    assert ended == 10
    monkeypatch.setattr(sharing, "STREAM_WAIT_LIMIT_S", 0.1)
    tasks = [asyncio.create_task(take(0.05)) for _ in range(10)]
    await asyncio.wait(tasks)
    assert isinstance(tasks[-1].exception(), Interrupted) and ended > 10
    assert not streams._active and not streams._waiters


async def test_a_stream_cancelled_during_its_wait_leaves_nothing() -> None:
    streams = StreamLimiter(1)

    async def take() -> None:
        async with streams.hold(StreamTurn("b", Rate()), WATCH):
            pass

    async with streams.hold(StreamTurn("a", Rate()), WATCH):
        task = asyncio.create_task(take())
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not streams._active and not streams._waiters
