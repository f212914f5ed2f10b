"""Debugging of the running server: stacks of threads and tasks, and a sampling profiler.

SIGUSR1 writes the threads' stacks to stderr, even when the event loop hangs and answers no call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from types import CodeType, FrameType
from typing import Any

PROFILE_LIMIT_S = 300.0
INTERVAL_S = 0.005


def enable_signal() -> None:
    """Make SIGUSR1 dump the threads' stacks; by default it ends the process."""
    # signal.signal would not do: Python runs its handlers between two bytecodes of the main thread,
    # which a hanging call never reaches.
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def stacks() -> str:
    """Return the stacks of all threads, and of all tasks with the coroutines that they await, as
    text. Call on the event loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, '?')} ({ident})\n{lines}")
    parts += [_task(task) for task in sorted(asyncio.all_tasks(), key=lambda t: t.get_name())]
    return "\n".join(parts)


def _task(task: asyncio.Task[Any]) -> str:
    """Return a task's name, its chain of coroutines (the innermost last), and what the innermost
    coroutine waits for."""
    lines: list[str] = []
    waiting: object = None
    awaited: object = task.get_coro()
    while awaited is not None:
        # Task.get_stack returns only the outermost frame of a task that waits.
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}\n")
        waiting = awaited
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    reason = "" if hasattr(waiting, "cr_frame") else f"  waits for {type(waiting).__name__}\n"
    return f"task {task.get_name()}\n{''.join(lines)}{reason}"


def profile(seconds: float) -> list[str]:
    """Sample all threads every 5 ms for `seconds`; return folded stacks for a flame graph, lines of
    `thread;outermost;…;innermost COUNT`.

    Blocks: run it in a thread. Waiting threads are sampled, too, at the line where they wait.
    """
    own, samples = threading.get_ident(), Counter[tuple[str, tuple[CodeType, ...]]]()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != own:
                samples[names.get(ident, "?"), _codes(frame)] += 1
        time.sleep(INTERVAL_S)
    lines = (
        (";".join([thread.replace(" ", "_"), *map(_name, codes)]), n)
        for (thread, codes), n in samples.items()
    )
    return [f"{stack} {count}" for stack, count in sorted(lines, key=lambda each: -each[1])]


def _codes(frame: FrameType) -> tuple[CodeType, ...]:
    """Return the code objects of a stack, from the outermost frame to `frame`."""
    return tuple(each.f_code for each, _ in traceback.walk_stack(frame))[::-1]


def _name(code: CodeType) -> str:
    folders = code.co_filename.removesuffix(".py").split("/")
    return f"{'/'.join(folders[-2:])}:{code.co_qualname}".replace(" ", "_").replace(";", "_")
