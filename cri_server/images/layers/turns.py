"""Limits the number of processes that work on layers at once, by the memory that each may take."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cri_server.images.layers import jail
from cri_server.images.waiting import Watch

_STREAM_BYTES = jail.DECODER_MEMORY_LIMIT_BYTES + jail.TAR_MEMORY_LIMIT_BYTES


class NoTurn(Exception):
    """All places for work on layers are taken."""


class Turns:
    """A semaphore, some of whose holders have borrowed their turn and lose it when another task
    needs one."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._borrowed: dict[asyncio.Task[object], None] = {}  # oldest first

    @asynccontextmanager
    async def held(self, watch: Watch) -> AsyncIterator[None]:
        """Hold a turn for the block; tasks get it in order, and waiting does not count as a lack of
        progress. When all turns are taken, the oldest borrowed one is taken back."""
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
        """Hold a turn for a block that is optional: its task is cancelled when another one needs
        the turn. Raises NoTurn when none is free."""
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
    """How many blobs of all pulls may be decoded while they arrive. Each needs two processes. They
    usually take a few MiB and wait for a registry, but a hostile layer can make them reach their
    limits, so together they get half of the memory."""
    return min(16, max(4, memory_bytes // 2 // _STREAM_BYTES))


def indexes_at_once(memory_bytes: int, processors: int) -> int:
    """How many processes build an index, with the tree of all files in memory. Together they get a
    quarter of the memory, and at least one runs."""
    return min(max(2, processors), max(1, memory_bytes // 4 // jail.MEMORY_LIMIT_BYTES))


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
