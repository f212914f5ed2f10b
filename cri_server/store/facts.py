"""Facts about the host from which states are derived: processes by pid and start time, and the
current boot."""

from __future__ import annotations

import os
import time

from pyrunc.kernel.process import alive_since
from pyrunc.records import Record


class ProcessIdentity(Record):
    """Identifies a process, so that a later one with the same pid is not mistaken for it.
    `start_time`: field 22 of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    start_time: int

    def alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        return alive_since(self.pid) == self.start_time


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def boot_time_ns() -> int:
    """Return when this boot began, in nanoseconds since the epoch."""
    # CLOCK_MONOTONIC stands still while the machine is suspended (clock_gettime(2)).
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def entries(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in `folder`; empty when it does not exist."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
