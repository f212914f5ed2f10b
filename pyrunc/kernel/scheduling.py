"""How the scheduler treats a thread: sched(7)."""

from __future__ import annotations

import os
from contextlib import suppress


def set_batch_policy() -> None:
    """SCHED_BATCH for this thread and those that it starts, at the nice value that it has: when it
    is woken it takes the processor from nobody, but waits for one that is idle. For work in bulk
    that goes through several threads: otherwise each block that is handed on stops the thread that
    everything waits for, on its processor, while another one is idle (Linux,
    check_preempt_wakeup_fair()).

    Does nothing where it is refused.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
