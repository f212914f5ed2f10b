"""Errors of files on a disk, in words for the node's owner: bytes, inodes or a quota that ran out,
and on which file system."""

from __future__ import annotations

import os
from errno import EDQUOT, ENOSPC

from pyrunc.errors import KernelError, ResourceExhausted, kernel_errors

FULL = (ENOSPC, EDQUOT)


class disk_errors(kernel_errors):
    """A block that works on files of ours at a path: its OSError becomes what `disk_error` makes of
    it."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise disk_error(error, self._call, self._subject) from None


def disk_error(error: OSError, call: str, path: str) -> ResourceExhausted | KernelError:
    """An OSError about one of our files: the one that it names, else `path`."""
    named = error.filename
    place = named if isinstance(named, str) and os.path.isabs(named) else path
    if error.errno in FULL:
        return ResourceExhausted(f"{call}: {reason(error.errno, place)}")
    return KernelError.of(error, call, repr(place))


def reason(number: int, path: str) -> str:
    """Why writing at `path`, which need not exist, failed with one of FULL. A file system says
    ENOSPC for both its limits."""
    if number == EDQUOT:
        return f"the disk quota on the file system of {path} is used up"
    return f"no {_what(path)} left on the file system of {path}"


def _what(path: str) -> str:
    while True:
        try:
            found = os.statvfs(path)
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path) or "."
        except OSError:
            return "space"
        else:
            return "inodes" if found.f_files and not found.f_favail else "space"
