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
    """A reusable daemon thread: it runs one function, then waits for the next."""

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
    # The caller waits 11 µs (processor time) for an idle thread, 94 µs for a new one.
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _IdleThread()
    worker.work.put((name, work))
