"""The two ends of a stream as sessions see them, whatever protocol carries them.

`Inbound` holds what the client has sent and nobody has taken yet. All streams of a connection share
one `Budget`: when it is used up the connection stops reading, and TCP holds the client back. The
peers know no other brake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

BUDGET_BYTES = 512 * 1024
PIECE_BYTES = 64  # what each piece costs beside its bytes


class StreamGone(Exception):
    """The client has reset the stream, or its connection is lost."""


class Budget:
    """Counts the bytes that wait in the streams of one connection."""

    def __init__(self, limit_bytes: int = BUDGET_BYTES) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._room = asyncio.Event()
        self._room.set()

    def use(self, size: int) -> None:
        """Count bytes in; beyond the limit there is no room until half of it is free."""
        self.used_bytes += size
        if self.used_bytes > self.limit_bytes:
            self._room.clear()

    def give_back(self, size: int) -> None:
        """Count bytes out."""
        self.used_bytes -= size
        if self.used_bytes <= self.limit_bytes // 2:
            self._room.set()

    @property
    def exhausted(self) -> bool:
        """Whether reading has to stop."""
        return not self._room.is_set()

    async def room(self) -> None:
        """Wait until there is room."""
        await self._room.wait()


class Inbound:
    """What the client sends on one stream: fed by the connection, read by the stream's owner."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._chunks: deque[bytes] = deque()
        self._ended = self._gone = self._unwanted = False
        self._changed = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Take bytes in."""
        if data and not self._unwanted and not self._ended:
            self._budget.use(len(data) + PIECE_BYTES)
            self._chunks.append(data)
            self._changed.set()

    def end(self) -> None:
        """The client sends no more; what waits can still be read."""
        self._ended = True
        self._changed.set()

    def lose(self) -> None:
        """The stream is gone: unless it had ended, what waits is thrown away and readers get
        `StreamGone`."""
        if self._ended:
            return
        self._gone = True
        self.discard()
        self._changed.set()

    def discard(self) -> None:
        """Throw away what waits and what still comes."""
        self._unwanted = True
        self._budget.give_back(sum(map(len, self._chunks)) + PIECE_BYTES * len(self._chunks))
        self._chunks.clear()

    async def read(self) -> bytes:
        """The next bytes; nothing at the end. Raises `StreamGone`."""
        while not self._chunks:
            if self._gone:
                raise StreamGone
            if self._ended:
                return b""
            self._changed.clear()
            await self._changed.wait()
        data = self._chunks.popleft()
        self._budget.give_back(len(data) + PIECE_BYTES)
        return data


class Outbound(Protocol):
    """What is sent to the client on one stream. Writing waits for TCP; both calls raise
    `StreamGone`."""

    async def write(self, data: bytes) -> None: ...
    async def end(self) -> None: ...
