"""Tests daemon threads, which are reused when their work has ended."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from cri_server.operations import threads


def run(name: str) -> tuple[str, threading.Thread]:
    """Run work in a thread; return the thread's name and the thread."""
    results: SimpleQueue[tuple[str, threading.Thread]] = SimpleQueue()

    def work() -> None:
        thread = threading.current_thread()
        results.put((thread.name, thread))

    threads.start(name, work)
    return results.get(timeout=30)


def wait_idle() -> None:
    for _ in range(3000):
        if threads._idle:
            return
        threading.Event().wait(0.01)
    raise AssertionError("no thread is idle")


def test_an_idle_thread_is_used_again_under_the_new_name() -> None:
    _, first = run("one")
    wait_idle()
    expected = threads._idle[-1].thread
    assert run("two") == ("two", expected) and first.daemon


def test_work_that_hangs_delays_no_other() -> None:
    never = threading.Event()
    for _ in range(threads.IDLE_LIMIT + 3):
        threads.start("hung", never.wait)  # type: ignore[arg-type]
    assert run("other")[0] == "other"
    never.set()
    wait_idle()
    assert run("again")[0] == "again"


def test_few_threads_stay() -> None:
    gate, ended = threading.Event(), SimpleQueue[None]()

    def work() -> None:
        gate.wait(30)
        ended.put(None)

    before = threading.active_count()
    for _ in range(20):
        threads.start("one of many", work)
    gate.set()
    for _ in range(20):
        ended.get(timeout=30)
    for _ in range(3000):
        if threading.active_count() <= before + threads.IDLE_LIMIT + 1:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the threads stay")
