"""Daemon threads for work that may hang in the kernel. Their number has no limit, so a hung thread
does not delay other work; it does not delay the process's exit either. A few idle threads are
reused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

IDLE_LIMIT = 4

Work = Callable[[], None]


class _IdleThread:
    """A thread that runs functions one after the other, and waits while there is none."""

    def __init__(self) -> None:
        self.work: SimpleQueue[tuple[str, Work]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.thread.name, work = self.work.get()
            work()
            del work  # else an idle thread would keep its objects alive
            if len(_idle) >= IDLE_LIMIT:
                return
            _idle.append(self)


_idle: list[_IdleThread] = []


def start(name: str, work: Work) -> None:
    """Run `work`, which must not raise, in a daemon thread with the name `name`."""
    # Use of an idle thread costs 11 µs of processor time, a new one 94 µs, for which the caller
    # waits.
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _IdleThread()
    worker.work.put((name, work))
