"""Keeps a part of the disk free for the node, when images are written."""

from __future__ import annotations

import errno
import os

from pyrunc.errors import ResourceExhausted
from pyrunc.kernel.full import reason

RESERVE_LIMIT_BYTES = 512 << 20
BLOCK_BYTES = 4096  # the smallest allocation; an empty file is charged one for its inode
_CHECK_BYTES = 1 << 20
_RESERVED_PART = 50  # the reserve is 1/50 of the bytes and of the inodes


class Reserve:
    """Checks that writing leaves the node's reserve of disk space free. Any number of processes may
    write, each with its own Reserve, which looks at the free space after every MiB. Sizes are
    rounded up to blocks, because a single byte takes a whole block."""

    def __init__(self, fd: int, folder: str) -> None:
        """`fd`: any open file on the file system; the caller closes it. `folder`: the path by which
        errors name the file system."""
        self._fd, self._folder = fd, folder
        self._charged = 0

    def charge(self, size: int) -> None:
        """Record that the caller is about to write `size` bytes (rounded up to blocks). Once per
        _CHECK_BYTES, check the file system's free space and inodes. Raises OSError, and
        ResourceExhausted if the node's reserve would be used up."""
        self._charged += size + -size % BLOCK_BYTES
        if self._charged >= _CHECK_BYTES:
            self._charged = 0
            self._check()

    def _check(self) -> None:
        status = os.fstatvfs(self._fd)
        if status.f_bavail * status.f_frsize < reserve_bytes(status) + _CHECK_BYTES:
            raise ResourceExhausted(describe_full(status, self._folder))
        inodes = status.f_files // _RESERVED_PART
        # btrfs makes inodes as needed, and reports 0.
        if status.f_files and status.f_favail < inodes + _CHECK_BYTES // BLOCK_BYTES:
            raise ResourceExhausted(
                f"no inodes left on the file system of {self._folder}"
                f" ({inodes} are reserved for the node)"
            )


def reserve_bytes(status: os.statvfs_result) -> int:
    """Return the bytes of a file system that are reserved for the node."""
    return min(RESERVE_LIMIT_BYTES, status.f_blocks * status.f_frsize // _RESERVED_PART)


def describe_full(status: os.statvfs_result, folder: str) -> str:
    """Return an error message which says that nothing more can be written to the file system of
    `folder`."""
    return (
        f"{reason(errno.ENOSPC, folder)} ({reserve_bytes(status)} bytes are reserved for the node)"
    )
