"""The part of a disk that is kept for the node, however much images write."""

from __future__ import annotations

import errno
import os

from pyrunc.errors import ResourceExhausted
from pyrunc.kernel.full import reason

RESERVE_LIMIT_BYTES = 512 << 20
BLOCK_BYTES = 4096  # what one byte takes, and a file of none with its inode
_LOOK_BYTES = 1 << 20
_RESERVED_PART = 50  # one of so many, of bytes and of inodes


class Reserve:
    """Keeps the reserve while files are written to a file system, by any number of processes at
    once: each looks at what is left after every MiB that it has charged. What is charged are
    blocks, because a byte takes a whole one."""

    def __init__(self, fd: int, folder: str) -> None:
        """`fd`: anything on the file system, which stays the caller's; `folder`: what an error
        names it by."""
        self._fd, self._folder = fd, folder
        self._charged = 0

    def charge(self, size: int) -> None:
        """`size` bytes are to be written in one place; 0 for none. Raises ResourceExhausted,
        OSError."""
        self._charged += size + -size % BLOCK_BYTES
        if self._charged >= _LOOK_BYTES:
            self._charged = 0
            self._look()

    def _look(self) -> None:
        status = os.fstatvfs(self._fd)
        if status.f_bavail * status.f_frsize < reserve_bytes(status) + _LOOK_BYTES:
            raise ResourceExhausted(describe_full(status, self._folder))
        inodes = status.f_files // _RESERVED_PART
        if status.f_files and status.f_favail < inodes + _LOOK_BYTES // BLOCK_BYTES:
            raise ResourceExhausted(
                f"no inodes left on the file system of {self._folder} ({inodes} are kept for the node)"
            )


def reserve_bytes(status: os.statvfs_result) -> int:
    """What of a file system is kept for the node."""
    return min(RESERVE_LIMIT_BYTES, status.f_blocks * status.f_frsize // _RESERVED_PART)


def describe_full(status: os.statvfs_result, folder: str) -> str:
    """Why nothing more is written to the file system of `folder`."""
    return f"{reason(errno.ENOSPC, folder)} ({reserve_bytes(status)} bytes are kept for the node)"
