"""Tests locks by key, and that cancelled callers wait for the end of their work."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from cri_server.operations.locks import KeyedLock
from cri_server.operations.tasks import finish_in_thread, shield_until_done


def test_a_caller_that_is_cancelled_twice_still_waits() -> None:
    async def run() -> None:
        gate, ended = asyncio.Event(), list[str]()

        async def work() -> None:
            await gate.wait()
            ended.append("work")

        caller = asyncio.create_task(shield_until_done(work()))
        for _ in range(2):
            await asyncio.sleep(0)
            caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        gate.set()
        with suppress(asyncio.CancelledError):
            await caller
        assert caller.cancelled() and ended == ["work"]

    asyncio.run(run())


def test_a_cancelled_caller_waits_for_its_thread() -> None:
    async def run() -> None:
        gate = threading.Event()
        caller = asyncio.create_task(finish_in_thread(gate.wait))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0.01)
        assert not caller.done()
        gate.set()
        with suppress(asyncio.CancelledError):
            await caller
        assert caller.cancelled()
        assert await finish_in_thread(lambda: 7) == 7

    asyncio.run(run())


def test_a_key_has_a_single_owner_and_is_forgotten_afterwards() -> None:
    async def run() -> None:
        lock, inside, most = KeyedLock(), 0, 0

        async def hold(key: str) -> None:
            nonlocal inside, most
            async with lock.hold(key):
                inside, most = inside + 1, max(most, inside + 1)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(hold("one") for _ in range(5)))
        assert most == 1 and "one" not in lock
        waiting = asyncio.create_task(hold("one"))
        async with lock.hold("one"), lock.hold("other"):
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert "one" in lock and "other" in lock
        assert "one" not in lock and "other" not in lock

    asyncio.run(run())
