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
    """`Turns.borrow` found no free turn."""


class Turns:
    """A semaphore of `count` turns. `hold` waits for a turn. `borrow` takes only a free turn, and
    its task is cancelled when a call of `hold` needs the turn."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._borrowed: dict[asyncio.Task[object], None] = {}  # oldest first

    @asynccontextmanager
    async def hold(self, watch: Watch) -> AsyncIterator[None]:
        """Wait for a turn, in the order of the calls, and hold it for the `with` block. When all
        turns are taken, cancel the task with the oldest borrowed turn. `watch` is paused while this
        call waits."""
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
        """Hold a turn for the `with` block. Raises NoTurn if none is free. When all turns are taken
        and another task calls `hold`, the task of this block may be cancelled."""
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
    """Return how many blobs all pulls together may decode while they arrive: as many as fit into
    half of `memory_bytes`, but at least 4 and at most 16. Each blob needs two processes. These
    usually take a few MiB and wait for a registry, but a hostile layer can drive both to their
    memory limits."""
    return min(16, max(4, memory_bytes // 2 // _STREAM_BYTES))


def indexes_at_once(memory_bytes: int, processors: int) -> int:
    """Return how many processes may build an EROFS index at once: one for each processor, but at
    least two. If these could together use more than a quarter of `memory_bytes`, return fewer, but
    at least one. Each process holds the tree of all files of an image in memory."""
    return min(max(2, processors), max(1, memory_bytes // 4 // jail.MEMORY_LIMIT_BYTES))


def memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
