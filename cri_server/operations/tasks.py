"""Runs asyncio tasks as a group, in the background, or shielded from the caller's cancellation."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


async def gather(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run the coroutines at the same time and return their results in the order of `work`.

    When one fails, or the caller is cancelled, the others are cancelled (asyncio.gather leaves them
    running). After all have ended, the first failure is raised, with a note for each further one.
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


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` in a task called `name` during the `with` block; cancel the task at the end of the
    block. Raises the error of `work`."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def finish_in_thread(work: Callable[[], Outcome]) -> Outcome:
    """Run `work` in a thread, and wait for its end even when the caller is cancelled."""
    # asyncio.to_thread is a coroutine, so it would need a task beside the caller's.
    run = contextvars.copy_context().run
    return await shield_until_done(asyncio.get_running_loop().run_in_executor(None, run, work))


async def shield_until_done(work: Awaitable[Outcome]) -> Outcome:
    """Wait for `work` even when the caller is cancelled, so that later steps or an undo cannot run
    before its end. Used for threads and forks, which cannot be stopped."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await wait_through_cancellation(running)
        raise


async def wait_through_cancellation(future: asyncio.Future[Any]) -> None:
    """Wait until the future is done, even when the caller is cancelled meanwhile. Ignores the
    future's result and exception; the caller must raise its CancelledError afterwards."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()
