"""Several pieces of work at the same time, of which all succeed or one failure is told; and work
that is not left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results, in the order of `work`.

    When one fails, or the caller is cancelled, the others are cancelled; when all have ended the
    first failure is raised, with a note for each other one.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        first, *others = failed.exceptions
        for other in others:
            first.add_note(f"meanwhile: {other}")
        raise first from None
    return [task.result() for task in tasks]


async def to_the_end(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Waits for work that cannot be stopped, a thread or a fork, even when cancelled: later steps,
    or a roll-back, must not run before its end."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await outlast(running)
        raise


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait for the future through every cancellation, which the caller raises afterwards. What it
    ended with is passed over."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()
