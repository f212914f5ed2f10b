"""How many processes work on layers at once, by the memory that each of them may take."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cri_server.images.layers import jail
from cri_server.images.waiting import Watch

_STREAM_BYTES = jail.DECODER_MEMORY_LIMIT_BYTES + jail.TAR_MEMORY_LIMIT_BYTES


class NoTurn(Exception):
    """All turns are taken."""


class Turns:
    """So many holders at once. Some have their turn only until another needs it."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._borrowed: dict[asyncio.Task[object], None] = {}  # oldest first

    @asynccontextmanager
    async def held(self, watch: Watch) -> AsyncIterator[None]:
        """A turn for a block, waited for in order; waiting is not a lack of progress. Where all are
        taken, the oldest one that is lent is taken back."""
        if self._free.locked() and self._borrowed:
            task = next(iter(self._borrowed))
            del self._borrowed[task]
            task.cancel()
        with watch.paused():
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[None]:
        """A turn for a block that need not be: its task is cancelled when another needs the turn.
        Raises NoTurn when none is free."""
        if self._free.locked():
            raise NoTurn
        await self._free.acquire()
        task = asyncio.current_task()
        assert task is not None
        self._borrowed[task] = None
        try:
            yield
        finally:
            self._borrowed.pop(task, None)
            self._free.release()


def streams_at_once(memory_bytes: int) -> int:
    """Blobs that are worked on while they arrive, of all pulls: each has two processes of a few MiB
    that mostly wait for a registry, but that a layer may make large. All of them have half of the
    memory."""
    return min(16, max(4, memory_bytes // 2 // _STREAM_BYTES))


def indexes_at_once(memory_bytes: int, processors: int) -> int:
    """Processes that make an index, whose tree of files is in memory. All of them have a quarter of
    it, or one has what it needs."""
    return min(max(2, processors), max(1, memory_bytes // 4 // jail.MEMORY_LIMIT_BYTES))


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
