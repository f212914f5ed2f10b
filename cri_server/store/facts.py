"""Facts of the host that states are derived from: processes by pid and start time, and the boot
that we are in."""

from __future__ import annotations

import os
import time

from pyrunc.kernel.process import alive_since
from pyrunc.records import Record


class Process(Record):
    """A process that cannot be mistaken for a later one of the same pid: `start_time` is field 22
    of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    start_time: int

    def alive(self) -> bool:
        """Whether it runs (a zombie does not)."""
        return alive_since(self.pid) == self.start_time


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def boot_time_ns() -> int:
    """When this boot began, in nanoseconds since the epoch."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def entries(folder: str | os.PathLike[str]) -> list[str]:
    """The names in `folder`; none when it does not exist."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
