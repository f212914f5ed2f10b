"""Removing what somebody else has put on disk: without recursion, with two descriptors however deep
the folders are.

Names are used one at a time, beneath the folder they were read from, so no symbolic link is
followed and no path is too long; a folder is entered by openat2(2) with RESOLVE_NO_XDEV, so nothing
behind a mount is touched. The way up is `..`, and it must lead to the folder that we came from.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR

from pyrunc.abi.file import RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV
from pyrunc.errors import KernelError
from pyrunc.kernel.path import openat2

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Folder:
    """A folder on the way down: its name in the one above, its identity, and its folders that are
    still to be removed."""

    __slots__ = ("identity", "left", "name")

    def __init__(self, fd: int, name: str) -> None:
        self.name, self.identity, self.left = name, identity(fd), _remove_files(fd)


def remove_tree(parent_fd: int, name: bytes | str) -> None:
    """Remove `name` in the directory and all beneath it. What is missing, or goes meanwhile, is
    fine.

    Raises OSError; EXDEV when something is mounted inside, ESTALE when folders are moved meanwhile.
    """
    name = os.fsdecode(name)
    try:
        if not S_ISDIR(os.lstat(name, dir_fd=parent_fd).st_mode):
            os.unlink(name, dir_fd=parent_fd)
            return
        current = open_folder(parent_fd, name)
    except FileNotFoundError:
        return
    way: list[_Folder] = []
    try:
        way.append(_Folder(current, name))
        while way:
            if way[-1].left:
                current = _enter(current, way)
            else:
                done = way.pop().name
                current = _leave(current, way, parent_fd)
                _unless_gone(os.rmdir, done, current)
    finally:
        os.close(current)


def remove_path(path: str | os.PathLike[str]) -> None:
    """`remove_tree` for a path of our own."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_tree(parent, name)
    finally:
        os.close(parent)


def _enter(current: int, way: list[_Folder]) -> int:
    """Down into one of the folders that are left; where we are now."""
    name = way[-1].left.pop()
    try:
        below = open_folder(current, name)
    except FileNotFoundError:
        return current
    os.close(current)
    way.append(_Folder(below, name))
    return below


def _leave(current: int, way: list[_Folder], parent_fd: int) -> int:
    """Up; where we are now."""
    if not way:
        above = os.dup(parent_fd)
    else:
        above = os.open("..", FOLDER, dir_fd=current)
        if identity(above) != way[-1].identity:
            os.close(above)
            raise OSError(errno.ESTALE, "moved while it is removed", way[-1].name)
    os.close(current)
    return above


def _remove_files(folder: int) -> list[str]:
    """Unlink all that is no folder; the names of the folders."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                _unless_gone(os.unlink, entry.name, folder)
    return folders


def _unless_gone(remove: Callable[..., None], name: str, folder: int) -> None:
    try:
        remove(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def open_folder(parent_fd: int, name: str) -> int:
    try:
        return openat2(parent_fd, name, FOLDER, resolve=RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS)
    except KernelError as error:
        raise OSError(error.errno, os.strerror(error.errno), name) from None


def identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
