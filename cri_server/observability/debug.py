"""What the running server is doing: the stacks of its threads and tasks, and where its time goes.

SIGUSR1 writes the threads' stacks to stderr, also when the event loop hangs and no call is
answered.
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
    """From here on SIGUSR1 shows the threads; without this it would end the server."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def stacks() -> str:
    """The stacks of all threads, and of all tasks down to what each waits for. Call on the event
    loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, '?')} ({ident})\n{lines}")
    parts += [_task(task) for task in sorted(asyncio.all_tasks(), key=lambda t: t.get_name())]
    return "\n".join(parts)


def _task(task: asyncio.Task[Any]) -> str:
    """A task and the coroutines that wait for each other, the innermost last."""
    lines: list[str] = []
    waiting: object = None
    awaited: object = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}\n")
        waiting, awaited = (
            awaited,
            getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None),
        )
    reason = "" if hasattr(waiting, "cr_frame") else f"  waits for {type(waiting).__name__}\n"
    return f"task {task.get_name()}\n{''.join(lines)}{reason}"


def profile(seconds: float) -> list[str]:
    """Look at all threads every 5 ms for `seconds`; lines of `thread;outermost;…;innermost COUNT`,
    as flame graphs take them.

    Blocks: run it in a thread. What only waits is seen as well, at the line where it does.
    """
    own, found = threading.get_ident(), Counter[tuple[str, tuple[CodeType, ...]]]()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != own:
                found[names.get(ident, "?"), _codes(frame)] += 1
        time.sleep(INTERVAL_S)
    lines = (
        (";".join([thread.replace(" ", "_"), *map(_name, codes)]), n)
        for (thread, codes), n in found.items()
    )
    return [f"{stack} {count}" for stack, count in sorted(lines, key=lambda each: -each[1])]


def _codes(frame: FrameType | None) -> tuple[CodeType, ...]:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(codes))


def _name(code: CodeType) -> str:
    folders = code.co_filename.removesuffix(".py").split("/")
    return f"{'/'.join(folders[-2:])}:{code.co_qualname}".replace(" ", "_").replace(";", "_")
