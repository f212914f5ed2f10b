"""Disk usage of a tree that a hostile process may change meanwhile: a container's writable layer.

Walked by descriptors, two at a time, like `tree`'s removal: no link is followed, even if an entry
becomes one meanwhile, and paths beyond PATH_MAX are counted too. Nothing is stored per file,
because there may be millions.
"""

from __future__ import annotations

import os
from stat import S_ISDIR

from pyrunc.kernel.tree import FOLDER, identity, open_folder, open_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_BYTES = 512  # of st_blocks, whatever the filesystem's is (stat(2))


class _Level:
    """A folder on the way down: its identity, and its subfolders that are still to be visited."""

    __slots__ = ("identity", "left")

    def __init__(self, fd: int) -> None:
        self.identity: tuple[int, int] = identity(fd)
        self.left: list[str] = []


def usage(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the bytes on disk and the number of inodes of the folder and all below it.

    A file with n hard links counts as 1/n for each link in the tree. Files that vanish meanwhile do
    not count; when folders are moved meanwhile, the result is the sum up to that moment.
    """
    used, inodes = 0.0, 0.0
    for status in _entries(path):
        # A folder's link count is that of its subfolders, not of names.
        links = 1 if S_ISDIR(status.st_mode) else max(1, status.st_nlink)
        used += status.st_blocks * BLOCK_BYTES / links
        inodes += 1 / links
    return round(used), round(inodes)


def _entries(path: str | os.PathLike[str]) -> Iterator[os.stat_result]:
    try:
        current = os.open(path, FOLDER)
    except OSError:
        return
    try:
        stack = [_Level(current)]
        yield from _scan(current, stack[-1])
        while stack:
            if stack[-1].left:
                try:
                    below = open_folder(current, stack[-1].left.pop())
                except OSError:  # gone, or no folder any more
                    continue
                os.close(current)
                current = below
                stack.append(_Level(current))
                yield from _scan(current, stack[-1])
            else:
                stack.pop()
                if stack:
                    above = open_parent(current, stack[-1].identity)
                    os.close(current)
                    current = above
    except OSError:
        return
    finally:
        os.close(current)


def _scan(folder: int, level: _Level) -> Iterator[os.stat_result]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield status
            if entry.is_dir(follow_symlinks=False):
                level.left.append(entry.name)
