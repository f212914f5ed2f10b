"""A module for a zygote, whose jobs count their changes to files. One job ends before the change
with a chosen number.

The count and that number are in a file, PYRUNC_TESTS_JOB_CHANGES, which is mapped before jobs are
forked, because their jails let them open nothing. The jails also refuse kill(2), so a job ends by
_exit(2): as after a kill, none of its code runs any more.
"""

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
    """Lets the test read and set the count of changes in the mapped file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_NUMBERS.size))
        self._path = path

    def end_at(self, number: int) -> None:
        """Starts the count again: the job ends before change `number`."""
        with open(self._path, "r+b") as file:  # the same file, for it is mapped
            file.write(_NUMBERS.pack(0, number))

    def count(self) -> int:
        """Returns the number of changes since `end_at`."""
        return int(_NUMBERS.unpack(self._path.read_bytes())[0])


def inherit(lowest: int) -> list[int]:
    """Makes each job count its changes; the zygote calls this before its first fork. Returns no
    descriptors for jobs to inherit."""
    with open(os.environ[FILE], "r+b") as file:
        area = mmap.mmap(file.fileno(), _NUMBERS.size)
    zygote = os.getpid()

    def count() -> None:
        if os.getpid() == zygote:
            return
        done, last = _NUMBERS.unpack_from(area)
        _NUMBERS.pack_into(area, 0, done + 1, last)
        if done + 1 == last:
            os._exit(EXIT_CODE)

    before_each_change(count)
    return []
