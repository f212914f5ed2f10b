"""How much the image store may still write: its disk's free space minus a reserve for the node."""

from __future__ import annotations

import os
from pathlib import Path

from cri_server.images.layers.inflate import Limits
from cri_server.images.reserve import describe_full, reserve_bytes
from pyrunc.errors import ResourceExhausted


class SpaceLimit:
    """The limit for the file system of `root`, computed anew each time."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def free_bytes(self) -> int:
        """The bytes that may still be written."""
        status = os.statvfs(self._root)
        # f_bavail leaves out the blocks that ext4 reserves for root, 5 % by default.
        return max(0, status.f_bavail * status.f_frsize - reserve_bytes(status))

    def full(self) -> str:
        """Say why no more than `free_bytes` can be written."""
        return describe_full(os.statvfs(self._root), str(self._root))

    def limits_of_archive(self) -> Limits:
        """What an archive may unpack to: the free space. Raises ResourceExhausted when there is
        none."""
        free = self.free_bytes()
        if not free:
            raise ResourceExhausted(self.full())
        return Limits(free, reason=self.full(), subject="the archive", folder=str(self._root))

    def limits_of_layer(self) -> Limits:
        """What a layer may unpack to: its fixed limit or the free space, whichever is less. Raises
        ResourceExhausted when there is none."""
        limits, room = Limits(folder=str(self._root)), self.limits_of_archive()
        return (
            room.replace(subject=limits.subject) if room.size_bytes < limits.size_bytes else limits
        )
