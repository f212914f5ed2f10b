"""Several pieces of work at the same time, of which all succeed or one failure is told; and work that is not left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results, in the order of `work`.

    When one fails, or the caller is cancelled, the others are cancelled; when all have ended the first failure is raised, with
    a note for each other one.
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
    """What cannot be stopped where it is, a thread or a fork: whoever is cancelled meanwhile waits all the same, so that what comes after
    it does not overtake it."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # nobody asks for it
        raise
