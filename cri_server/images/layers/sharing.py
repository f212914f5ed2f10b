"""Coordinates concurrent pulls: a layer that several pulls need is processed only once, and the
number of blobs that are streamed into decoders at once is limited.

A pull waits for another pull's work only if both use the same registry, and only while the other
pull is fast. Otherwise a tenant could pull an image with the same layers from a slow registry, and
so delay the pulls of others. A pull waits only briefly for a turn to stream, because it can fetch
the blob to a file instead.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from cri_server.images.layers.ring import Interrupted
from cri_server.images.waiting import Watch

SLOW_S = 10.0
FAST_BYTES = 320 << 10  # a source that sends less in SLOW_S is slow
STREAM_WAIT_S, STREAM_WAIT_LIMIT_S = 3.0, 30.0
_POLL_S = 1.0


class Rate:
    """Measures how fast the content of one layer or image is downloaded. Use on the event loop."""

    def __init__(self) -> None:
        self._bytes, self._since = 0, time.monotonic()
        self._node_works = 0

    def arrived(self, size: int) -> None:
        """Count received bytes."""
        self._bytes += max(0, size)
        if self._bytes >= FAST_BYTES:
            self.restart()

    @contextmanager
    def node_work(self) -> Iterator[None]:
        """Leave the `with` block's time out of the measurement, because the block waits for this
        machine, not for a registry."""
        self._node_works += 1
        try:
            yield
        finally:
            self._node_works -= 1
            self.restart()

    @property
    def is_slow(self) -> bool:
        """Return whether less than FAST_BYTES arrived in the last SLOW_S."""
        return not self._node_works and time.monotonic() - self._since > SLOW_S

    def restart(self) -> None:
        """Forget the received bytes, and measure from now on."""
        self._bytes, self._since = 0, time.monotonic()


class SharedWork:
    """Serializes concurrent work on the same key (a layer, a tar, an EROFS index). But no caller
    waits for a slow worker. All callers must use the same event loop."""

    def __init__(self) -> None:
        self._rates: dict[str, list[Rate]] = {}
        self._ended: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, key: str, rate: Rate, watch: Watch) -> AsyncIterator[None]:
        """Wait until no fast worker works on `key`, then run the `with` block. `rate` measures the
        block's download: other callers wait for the block only while this download is fast. `watch`
        is paused while this call waits."""
        with watch.paused():
            while any(not other.is_slow for other in self._rates.get(key, ())):
                await self._wait(key)
        self._rates.setdefault(key, []).append(rate)
        rate.restart()
        try:
            yield
        finally:
            self._rates[key].remove(rate)
            if not self._rates[key]:
                del self._rates[key]
            if event := self._ended.pop(key, None):
                event.set()

    async def _wait(self, key: str) -> None:
        """Wait until a worker on `key` ends, but at most _POLL_S. The caller must then check the
        workers again, because a worker that was fast may have become slow."""
        event = self._ended.setdefault(key, asyncio.Event())
        try:
            # Not asyncio.wait_for(): that of Python 3.11 loses a cancellation that comes with the
            # result, and the pull would go on to wait for a layer that has failed.
            async with asyncio.timeout(min(_POLL_S, SLOW_S / 4)):
                await event.wait()
        except TimeoutError:
            pass


class StreamTurn:
    """A stream that waits for a turn, or has one. `origin`: the stream's registry. When another
    stream begins to wait, `give_way()` is called on slow streams that have a turn: on at most one
    for each waiting stream."""

    def __init__(self, origin: str, rate: Rate) -> None:
        self.origin, self.rate = origin, rate
        self.give_way: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Waiter:
    """A stream of a blob that waits for its turn to be decoded. `granted`: done when it gets the
    turn. `timeout`: ends the wait; it is extended whenever another stream gives back a turn.
    `limit`: when the wait ends at the latest, in seconds of the loop's clock."""

    granted: asyncio.Future[None]
    timeout: asyncio.Timeout
    limit: float


class StreamLimiter:
    """Limits how many blobs are streamed into decoders at once, and shares these streams fairly
    between registries. Use on one event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._active: list[StreamTurn] = []
        self._waiters: dict[StreamTurn, _Waiter] = {}

    @asynccontextmanager
    async def hold(self, turn: StreamTurn, watch: Watch) -> AsyncIterator[None]:
        """Wait until a stream may begin, and hold its turn during the `with` block. The next turn
        goes to the waiting stream whose registry has the fewest turns. `watch` is paused while this
        call waits.

        Raises Interrupted if the wait is too long: STREAM_WAIT_S after the last time that a stream
        ended, or STREAM_WAIT_LIMIT_S in total. The caller must then fetch the blob to a file, which
        needs no turn.
        """
        with watch.paused():
            await self._take(turn)
        try:
            yield
        finally:
            self._give_back(turn)

    async def _take(self, turn: StreamTurn) -> None:
        if len(self._active) < self._count:
            self._active.append(turn)
            return
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(STREAM_WAIT_S)
        waiter = _Waiter(loop.create_future(), timeout, loop.time() + STREAM_WAIT_LIMIT_S)
        try:
            async with timeout:
                self._waiters[turn] = waiter
                self._interrupt_slow()
                await waiter.granted
        except BaseException as error:
            if self._waiters.pop(turn, None) is None:  # granted just before the cancellation
                self._give_back(turn)
            if isinstance(error, TimeoutError):
                raise Interrupted from None
            raise

    def _interrupt_slow(self) -> None:
        # Otherwise a registry that sends its layers very slowly could hold all turns.
        slow = [stream for stream in self._active if stream.rate.is_slow]
        for stream in slow[: len(self._waiters)]:
            stream.give_way()

    def _give_back(self, turn: StreamTurn) -> None:
        self._active.remove(turn)
        if not self._waiters:
            return
        counts = Counter(stream.origin for stream in self._active)
        chosen = min(self._waiters, key=lambda waiter: counts[waiter.origin])  # the first of equals
        granted = self._waiters.pop(chosen).granted
        self._active.append(chosen)
        # The waiter may have been cancelled in this iteration of the loop; `_take` then gives the
        # turn back.
        if not granted.done():
            granted.set_result(None)
        now = asyncio.get_running_loop().time()
        for waiter in self._waiters.values():
            if not waiter.timeout.expired():
                waiter.timeout.reschedule(min(now + STREAM_WAIT_S, waiter.limit))
