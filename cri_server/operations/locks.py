"""Coordinates operations: `SingleFlight` joins equal calls, `KeyedLock` locks by key, `Gate` waits
until all tasks have left its `with` block.

kubelet repeats a call whose deadline has passed. The first call runs in a separate task, which
continues when its caller hangs up; the repeated call gets its result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar, cast

from pyrunc.errors import AlreadyExists

Outcome = TypeVar("Outcome")


class SingleFlight:
    """Runs at most one operation per key at a time; later calls with the key join the running
    operation."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._requests: dict[Hashable, object] = {}
        self._callers: dict[Hashable, int] = {}
        self._left_at: dict[Hashable, float] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def __len__(self) -> int:
        return len(self._running)

    async def join(
        self,
        key: Hashable,
        start: Callable[[], Coroutine[Any, Any, Outcome]],
        *,
        request: object = None,
    ) -> Outcome:
        """Run the operation `start()` under `key`, or wait for the one that already runs under
        `key`. Return its result.

        Cancelling the caller does not cancel the operation. Raises AlreadyExists when the running
        operation has another `request`.
        """
        task = self._running.get(key)
        if task is not None and self._requests.get(key) != request:
            raise AlreadyExists(
                f"a request with the same name and another configuration is running: {key}"
            )
        if task is None:
            self._requests[key] = request
            task = asyncio.get_running_loop().create_task(start(), name=str(key))
            self._running[key] = task
            task.add_done_callback(lambda done: self._finished(key, done))
        self._callers[key] = self._callers.get(key, 0) + 1
        try:
            # Without shield the deadline of one caller would cancel the operation for all that have
            # joined it.
            return cast(Outcome, await asyncio.shield(task))
        finally:
            # The count is gone after the end of the operation: `_finished` runs before the callers
            # wake.
            if key in self._callers:
                self._callers[key] -= 1
                self._left_at[key] = time.monotonic()

    def seconds_without_caller(self, key: Hashable) -> float:
        """Return the seconds since the last caller of the running operation `key` hung up; 0 while
        a caller waits. Thread-safe."""
        if self._callers.get(key, 0) or key not in self._left_at:
            return 0.0
        return time.monotonic() - self._left_at[key]

    async def drain(self, timeout_s: float) -> list[str]:
        """Wait until no operation runs, at most `timeout_s`; return the keys of the operations that
        still run, as text."""
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=timeout_s)
        return [str(key) for key in self._running]

    def _finished(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        self._running.pop(key, None)
        self._requests.pop(key, None)
        self._callers.pop(key, None)
        self._left_at.pop(key, None)
        if not task.cancelled():
            # Marks the exception as retrieved: the caller or the RPC layer has logged it, and
            # asyncio would log it a second time.
            task.exception()


class KeyedLock:
    """A lock per key; a lock that no task holds or awaits is dropped."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._locks

    @asynccontextmanager
    async def hold(
        self, key: str, waiting: AbstractContextManager[None] = nullcontext()
    ) -> AsyncIterator[None]:
        """Hold the lock of `key` during the `with` block. `waiting`: a context manager that is
        active during the wait for the lock; for example, it stops the clock of a timeout."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            with waiting:
                await lock.acquire()
            try:
                yield
            finally:
                lock.release()
        finally:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = (lock, users - 1)


class Gate:
    """Counts the tasks inside its `with` block, so that another task can wait until all have
    left."""

    def __init__(self) -> None:
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __enter__(self) -> Gate:
        self._inside += 1
        self._empty.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def empty(self) -> None:
        """Wait until no task is inside the `with` block."""
        await self._empty.wait()
