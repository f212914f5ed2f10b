"""A module for a zygote: its jobs count their changes to files, and one ends at once before the
change with a chosen number.

The count and that number are in a file, PYRUNC_TESTS_JOB_CHANGES, that is mapped before jobs
are forked: their jails let them open nothing, and refuse kill(2), so the end is _exit(2), after
which nothing of the process runs either.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

FILE = "PYRUNC_TESTS_JOB_CHANGES"
EXIT_CODE = 77
_NUMBERS = Struct("=QQ")
_CHANGES = (
    "mkdir",
    "mknod",
    "rename",
    "unlink",
    "link",
    "symlink",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "chmod",
    "fchmod",
    "chown",
    "fchown",
    "utime",
    "setxattr",
)


class Changes:
    """The test's side of the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_NUMBERS.size))
        self._path = path

    def end_at(self, number: int) -> None:
        """Starts the count at 1 again; the change with this number is not made."""
        with open(self._path, "r+b") as file:  # the same file, for it is mapped
            file.write(_NUMBERS.pack(0, number))

    def count(self) -> int:
        """Returns the number of changes since `end_at`."""
        return int(_NUMBERS.unpack(self._path.read_bytes())[0])


def inherit(lowest: int) -> list[int]:
    """Called in the zygote, before its first fork; no descriptors are kept."""
    with open(os.environ[FILE], "r+b") as file:
        area = mmap.mmap(file.fileno(), _NUMBERS.size)
    zygote = os.getpid()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if os.getpid() != zygote:
                done, last = _NUMBERS.unpack_from(area)
                _NUMBERS.pack_into(area, 0, done + 1, last)
                if done + 1 == last:
                    os._exit(EXIT_CODE)
            return call(*arguments, **options)

        return run

    for name in _CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    return []
