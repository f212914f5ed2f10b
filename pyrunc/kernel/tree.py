"""Walks and removes trees that untrusted processes have written. The walk uses no recursion, and
never more than two descriptors.

Each name is opened relative to its folder's descriptor, so the walk follows no symbolic link, and
no path is too long. openat2(2) with RESOLVE_NO_XDEV refuses mount points, so nothing behind a mount
is touched. To go up, the walk opens `..` and compares its device and inode with those of the
expected parent. If the folder was moved meanwhile, they differ, and the walk ends with ESTALE.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR

from pyrunc.abi.file import RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV
from pyrunc.errors import KernelError
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import openat2

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Visit = Callable[[int, Sequence[str]], list[str]]

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Folder:
    """One folder of the path from the top to the folder that is visited now. `identity`: its device
    and inode; `left`: its subfolders that are not visited yet."""

    __slots__ = ("identity", "left")

    def __init__(self, fd: int, subfolders: list[str]) -> None:
        self.identity, self.left = identity(fd), subfolders


def walk(
    top: int, visit: Visit, is_skipped: Callable[[OSError], bool]
) -> Iterator[tuple[int, str]]:
    """Walk the folder `top` and everything below it, depth first. Closes the descriptor `top`.
    Raises OSError; ESTALE when a folder was moved meanwhile.

    - `visit(folder, names)`: is called for each folder, with its descriptor and the names on the
      path from `top` to it. Returns the names of the subfolders to enter.
    - `is_skipped(error)`: tells whether to skip a subfolder that cannot be opened

    After a subfolder and all below it were visited, yields the descriptor of its parent and the
    subfolder's name.
    """
    current = top
    names: list[str] = []
    try:
        # Listed once: to list a folder again after each of its subfolders took 2.7 s for 5,000 of
        # them; this takes 0.6.
        stack = [_Folder(current, visit(current, names))]
        while True:
            if stack[-1].left:
                name = stack[-1].left.pop()
                try:
                    below = open_folder(current, name)
                except OSError as error:
                    if is_skipped(error):
                        continue
                    raise
                os.close(current)
                current = below
                names.append(name)
                stack.append(_Folder(current, visit(current, names)))
            elif names:
                stack.pop()
                above = os.open("..", FOLDER, dir_fd=current)
                os.close(current)
                current = above
                # A hostile process may have moved the folder: its `..` would lead out of the tree.
                if identity(current) != stack[-1].identity:
                    raise OSError(errno.ESTALE, "another process has moved it", names[-1])
                yield current, names.pop()
            else:
                return
    finally:
        os.close(current)


def remove_tree(parent_fd: int, name: bytes | str) -> None:
    """Remove `name` in the folder `parent_fd`, with everything below it. Files that are missing or
    vanish are no error.

    Raises OSError; EXDEV when something is mounted inside, ESTALE when folders are moved meanwhile.
    """
    name = os.fsdecode(name)
    try:
        if not S_ISDIR(os.lstat(name, dir_fd=parent_fd).st_mode):
            os.unlink(name, dir_fd=parent_fd)
            return
        top = open_folder(parent_fd, name)
    except FileNotFoundError:
        return
    for folder, done in walk(top, _remove_files, lambda error: error.errno == errno.ENOENT):
        _unless_gone(os.rmdir, done, folder)
    # By the caller's descriptor: if the top was moved, its `..` is another folder.
    _unless_gone(os.rmdir, name, parent_fd)


def remove_path(path: str | os.PathLike[str]) -> None:
    """Call `remove_tree` for a path; does nothing when its parent does not exist."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with closing_fd(parent):
        remove_tree(parent, name)


def _remove_files(folder: int, names: Sequence[str]) -> list[str]:
    """Unlink all entries of `folder` except subfolders; return the subfolders' names."""
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
    """Open a subfolder. Raises OSError, also for a symbolic link and for a mount point."""
    try:
        return openat2(parent_fd, name, FOLDER, resolve=RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS)
    except KernelError as error:
        raise OSError(error.errno, os.strerror(error.errno), name) from None


def identity(fd: int) -> tuple[int, int]:
    """Return device and inode number of the descriptor's file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
