"""Several pieces of work at the same time, of which all succeed or one failure is told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
