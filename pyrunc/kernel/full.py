"""What ran out on a disk, in words for the node's owner: bytes, inodes or a quota, and on which file system."""

from __future__ import annotations

import os
from errno import EDQUOT, ENOSPC

FULL = (ENOSPC, EDQUOT)


def reason(number: int, path: str) -> str:
    """Why writing at `path`, which need not exist, failed with one of FULL. A file system says ENOSPC for both its limits."""
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
