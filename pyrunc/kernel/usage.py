"""What a tree takes on disk while somebody hostile changes it: a container's writable layer.

Walked by descriptors, two at a time, as `tree` removes: no link is followed, whatever becomes one
meanwhile, and what lies deeper than a path can say is counted too. Nothing is kept per file, for
there may be millions.
"""

from __future__ import annotations

import os
from stat import S_ISDIR

from pyrunc.kernel.tree import FOLDER, identity, open_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_BYTES = 512  # of st_blocks, whatever the filesystem's is (stat(2))


class _Level:
    """A folder on the way down: what it is, and its folders that are still to be looked at."""

    __slots__ = ("identity", "left")

    def __init__(self, fd: int) -> None:
        self.identity: tuple[int, int] = identity(fd)
        self.left: list[str] = []


def usage(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes on disk and inodes of all beneath the folder; of several hard links each is a part.
    What vanishes does not count, and when folders are moved meanwhile, what was counted until then.
    """
    used, inodes = 0.0, 0.0
    for status in _entries(path):
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
        way = [_Level(current)]
        yield from _look(current, way[-1])
        while way:
            if way[-1].left:
                try:
                    below = open_folder(current, way[-1].left.pop())
                except OSError:  # gone, or no folder any more
                    continue
                os.close(current)
                current = below
                way.append(_Level(current))
                yield from _look(current, way[-1])
            else:
                way.pop()
                if way:
                    above = os.open("..", FOLDER, dir_fd=current)
                    os.close(current)
                    current = above
                    if identity(current) != way[-1].identity:
                        return
    except OSError:
        return
    finally:
        os.close(current)


def _look(folder: int, level: _Level) -> Iterator[os.stat_result]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield status
            if entry.is_dir(follow_symlinks=False):
                level.left.append(entry.name)
