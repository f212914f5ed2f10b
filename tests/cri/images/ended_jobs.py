"""A module for a zygote: its jobs count their changes to files, and the job that reaches a chosen
number ends before that change."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from struct import Struct

from tests.cri.images.changes import before_each_change

FILE = "PYRUNC_TESTS_JOB_CHANGES"
EXIT_CODE = 77
_NUMBERS = Struct("=QQ")


class Changes:
    """The test's side: sets the number at which a job ends, and reads the count."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_NUMBERS.size))
        self._path = path

    def end_at(self, number: int) -> None:
        """Count from 0 again; a job ends before change `number` (0: none ends)."""
        with open(self._path, "r+b") as file:  # not a new file: this one is mapped
            file.write(_NUMBERS.pack(0, number))

    def count(self) -> int:
        """Return the number of changes since the last `end_at`."""
        return int(_NUMBERS.unpack(self._path.read_bytes())[0])


def inherit(lowest: int) -> list[int]:
    """Make each job count its changes. The zygote calls this before its first fork."""
    # mapped before the fork, because a job's jail lets it open nothing
    with open(os.environ[FILE], "r+b") as file:
        area = mmap.mmap(file.fileno(), _NUMBERS.size)
    zygote = os.getpid()

    def count() -> None:
        if os.getpid() == zygote:
            return
        done, last = _NUMBERS.unpack_from(area)
        _NUMBERS.pack_into(area, 0, done + 1, last)
        if done + 1 == last:
            os._exit(EXIT_CODE)  # like a kill, which the jail refuses: no other code runs

    before_each_change(count)
    return []  # no descriptors for jobs to inherit
