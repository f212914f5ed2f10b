"""Daemon threads for work that may hang in the kernel. As many run as there is work, so a hung one
takes no place from others, and none delays the exit. A few idle ones stay and are used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

MOST_IDLE = 4

Work = Callable[[], None]


class _Worker:
    """A thread that runs one function after another."""

    def __init__(self) -> None:
        self.work: SimpleQueue[tuple[str, Work]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.thread.name, work = self.work.get()
            work()
            del work  # an idle thread would keep what it refers to
            if len(_idle) >= MOST_IDLE:
                return
            _idle.append(self)


_idle: list[_Worker] = []


def start(name: str, work: Work) -> None:
    """Run `work`, which must not raise, in a daemon thread, which gets the name `name`."""
    # An idle thread takes 11 µs of processor time, a new one 94, and its starter waits for it.
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.work.put((name, work))
