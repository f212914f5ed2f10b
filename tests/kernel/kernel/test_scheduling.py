"""SCHED_BATCH applies to the calling thread and those that it starts, and to no other."""

from __future__ import annotations

import os
import threading

from pyrunc.kernel.scheduling import set_batch_policy


def test_a_thread_and_its_children_have_sched_batch() -> None:
    policies: list[int] = []

    def note() -> None:
        policies.append(os.sched_getscheduler(0))

    def work() -> None:
        set_batch_policy()
        note()
        child = threading.Thread(target=note)
        child.start()
        child.join()

    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH]
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before
