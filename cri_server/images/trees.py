"""Folders of unpacked files: removed without following links, without recursion, and with two descriptors however deep."""

from __future__ import annotations

import os
import stat

from pyrunc.kernel.path import open_beneath

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(parent_fd: int, name: bytes | str) -> None:
    """Remove `name` in the directory and all beneath it; missing is fine. Raises OSError.

    The walk goes down by name and up by `..`: nothing else may move these folders meanwhile.
    """
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=parent_fd).st_mode):
            os.unlink(name, dir_fd=parent_fd)
            return
    except FileNotFoundError:
        return
    names, current = [os.fsencode(name)], os.open(name, _OPEN, dir_fd=parent_fd)
    try:
        while names:
            deeper = _empty(current)
            if deeper is not None:
                names.append(deeper)
                current = _step(current, deeper)
            else:
                done = names.pop()
                current = _step(current, b"..") if names else _replace(current, os.dup(parent_fd))
                os.rmdir(done, dir_fd=current)
    finally:
        os.close(current)


def _empty(folder_fd: int) -> bytes | None:
    """Unlink what is no directory; the name of a directory that is in the way."""
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                try:
                    os.rmdir(name, dir_fd=folder_fd)
                except OSError:
                    return name
            else:
                os.unlink(name, dir_fd=folder_fd)
    return None


def _step(folder_fd: int, name: bytes) -> int:
    return _replace(folder_fd, os.open(name, _OPEN, dir_fd=folder_fd))


def _replace(old_fd: int, new_fd: int) -> int:
    os.close(old_fd)
    return new_fd


def open_folder(root_fd: int, path: bytes) -> int:
    """The directory at `path` beneath the root, over no symbolic link, readable; the caller closes it. Raises KernelError."""
    return open_beneath(root_fd, path or b".", os.O_RDONLY | os.O_DIRECTORY)
