"""Converts OSErrors of work on files to errors for the node's owner. Their messages name the file
system and the exhausted resource: space, inodes or a quota."""

from __future__ import annotations

import os
from errno import EDQUOT, ENOSPC

from pyrunc.errors import KernelError, ResourceExhausted, kernel_errors

FULL = (ENOSPC, EDQUOT)


class disk_errors(kernel_errors):
    """A context manager for work on a file, `disk_errors(call, path)`. An OSError of its `with`
    block is raised as ResourceExhausted (ENOSPC, EDQUOT) or KernelError."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise disk_error(error, self._call, self._subject) from None


def disk_error(error: OSError, call: str, path: str) -> ResourceExhausted | KernelError:
    """Return a ResourceExhausted for ENOSPC and EDQUOT, else a KernelError of `call`. The message
    names the file of `error`, or `path` if `error` has no absolute path."""
    named = error.filename
    place = named if isinstance(named, str) and os.path.isabs(named) else path
    if error.errno in FULL:
        return ResourceExhausted(f"{call}: {reason(error.errno, place)}")
    return KernelError.of(error, call, repr(place))


def reason(number: int, path: str) -> str:
    """Return the text of an error that names the exhausted resource and the path `path`, which need
    not exist. `number`: ENOSPC or EDQUOT. For ENOSPC, statfs(2) shows whether space or inodes are
    exhausted."""
    if number == EDQUOT:
        return f"the disk quota on the file system of {path} is used up"
    return f"no {_what(path)} left on the file system of {path}"


def _what(path: str) -> str:
    while True:
        try:
            status = os.statvfs(path)
        except (FileNotFoundError, NotADirectoryError):
            # The file could not be made, so its nearest existing parent tells the file system.
            path = os.path.dirname(path) or "."
        except OSError:
            return "space"
        else:
            # btrfs and others report 0 inodes in all: they have no limit.
            return "inodes" if status.f_files and not status.f_favail else "space"
