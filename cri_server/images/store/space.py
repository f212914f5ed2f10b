"""Computes how much the image store may still write: its disk's free space without the reserve for
the node."""

from __future__ import annotations

import os
from pathlib import Path

from cri_server.images.layers.inflate import UnpackLimits
from cri_server.images.reserve import describe_full, reserve_bytes
from pyrunc.errors import ResourceExhausted


class SpaceLimit:
    """Computes how much may be written to the file system of `root`, from its free space at each
    call."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def free_bytes(self) -> int:
        """Return the number of bytes that may still be written: the free bytes minus the node's
        reserve."""
        status = os.statvfs(self._root)
        # f_bavail leaves out the blocks that ext4 reserves for root, 5 % by default.
        return max(0, status.f_bavail * status.f_frsize - reserve_bytes(status))

    def describe_full(self) -> str:
        """Describe why no more than `free_bytes` can be written."""
        return describe_full(os.statvfs(self._root), str(self._root))

    def limits_of_archive(self) -> UnpackLimits:
        """Return how much an archive may unpack to: the free space. Raises ResourceExhausted when
        there is no space."""
        free = self.free_bytes()
        if not free:
            raise ResourceExhausted(self.describe_full())
        return UnpackLimits(
            free, reason=self.describe_full(), subject="the archive", folder=str(self._root)
        )

    def limits_of_layer(self) -> UnpackLimits:
        """Return how much a layer may unpack to: the fixed limit of a layer or the free space,
        whichever is less. Raises ResourceExhausted when there is no space."""
        fixed, free = UnpackLimits(folder=str(self._root)), self.limits_of_archive()
        return free.replace(subject=fixed.subject) if free.size_bytes < fixed.size_bytes else fixed
