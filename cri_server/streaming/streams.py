"""Defines the two directions of a stream, for SPDY and WebSocket alike.

`Inbound` buffers the data of the client. All streams of a connection share one `Budget`: when it is
exhausted, the server stops reading the connection, so that TCP slows the client down. Neither
SPDY's Go clients nor WebSocket have flow control for single streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

BUDGET_BYTES = 512 * 1024
# This is about the cost of a bytes object and its place in the deque: when only data was counted,
# 512 KiB in pieces of an octet took 21 MB.
CHUNK_OVERHEAD_BYTES = 64


class StreamGone(Exception):
    """The client has reset the stream, or its connection is lost."""


class Budget:
    """Limits how many bytes may be buffered in all streams of one connection."""

    def __init__(self, limit_bytes: int = BUDGET_BYTES) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._room = asyncio.Event()
        self._room.set()

    def use(self, size: int) -> None:
        """Count `size` bytes as buffered. Above the limit the budget is `exhausted`, until half of
        the limit is free."""
        self.used_bytes += size
        if self.used_bytes > self.limit_bytes:
            self._room.clear()

    def give_back(self, size: int) -> None:
        """Count `size` bytes as no longer buffered."""
        self.used_bytes -= size
        # Reading resumes only at half of the limit: just below the limit it would stop again with
        # the next chunk.
        if self.used_bytes <= self.limit_bytes // 2:
            self._room.set()

    @property
    def exhausted(self) -> bool:
        """Return whether the server must stop reading the connection, because its streams have
        buffered too much."""
        return not self._room.is_set()

    async def room(self) -> None:
        """Wait until the budget is no longer exhausted."""
        await self._room.wait()


class Inbound:
    """The data that the client sends on one stream. The connection's reader feeds it, and the
    stream's owner reads it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._chunks: deque[bytes] = deque()
        self._ended = self._gone = self._discarding = False
        self._changed = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Buffer data that the client has sent."""
        if data and not self._discarding and not self._ended:
            self._budget.use(len(data) + CHUNK_OVERHEAD_BYTES)
            self._chunks.append(data)
            self._changed.set()

    def end(self) -> None:
        """Mark the end of the client's data. Buffered data can still be read."""
        self._ended = True
        self._changed.set()

    def lose(self) -> None:
        """Mark the stream as lost: discard buffered data and raise `StreamGone` for readers. Does
        nothing if the client has ended its data."""
        if self._ended:
            return
        self._gone = True
        self.discard()
        self._changed.set()

    def discard(self) -> None:
        """Discard buffered data, and all data that comes later."""
        self._discarding = True
        self._budget.give_back(
            sum(map(len, self._chunks)) + CHUNK_OVERHEAD_BYTES * len(self._chunks)
        )
        self._chunks.clear()

    async def read(self) -> bytes:
        """Return the next bytes; empty at the end. Raises `StreamGone`."""
        while not self._chunks:
            if self._gone:
                raise StreamGone
            if self._ended:
                return b""
            self._changed.clear()
            await self._changed.wait()
        data = self._chunks.popleft()
        self._budget.give_back(len(data) + CHUNK_OVERHEAD_BYTES)
        return data


class Outbound(Protocol):
    """The half of one stream that sends to the client. `write` waits until TCP accepts the data;
    `end` half-closes the stream. Both raise `StreamGone`."""

    async def write(self, data: bytes) -> None: ...
    async def end(self) -> None: ...
