"""Measures the disk usage of a tree that a hostile process may change at the same time: a
container's writable layer.

Nothing is stored per file, because there may be millions.
"""

from __future__ import annotations

import os
from stat import S_ISDIR

from pyrunc.kernel.tree import FOLDER, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_BYTES = 512  # of st_blocks, whatever the filesystem's is (stat(2))


class _Sum:
    """Adds up the bytes on disk and the inodes of visited files."""

    def __init__(self) -> None:
        self.bytes = self.inodes = 0.0

    def add(self, status: os.stat_result) -> None:
        # A folder's link count tells the number of its subfolders, not of its names.
        links = 1 if S_ISDIR(status.st_mode) else max(1, status.st_nlink)
        self.bytes += status.st_blocks * BLOCK_BYTES / links
        self.inodes += 1 / links

    def visit(self, folder: int, names: Sequence[str]) -> list[str]:
        """Add the folder's entries; return the names of its subfolders."""
        subfolders = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    self.add(entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    subfolders.append(entry.name)
        return subfolders


def usage(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the bytes on disk and the number of inodes of everything below the folder.

    A file with n hard links counts as 1/n for each link in the tree. Files that vanish during the
    walk and folders that cannot be opened do not count. If a folder is moved during the walk, the
    walk ends, and the result is the sum so far.
    """
    total = _Sum()
    try:
        for _ in walk(os.open(path, FOLDER), total.visit, lambda error: True):
            pass
    except OSError:
        pass
    return round(total.bytes), round(total.inodes)
