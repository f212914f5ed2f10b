"""Copies a folder and everything below it, with owners, modes, times, hard links, extended
attributes, holes, devices and pipes.

Both sides are walked by descriptors, and no symbolic link is followed. The source may contain any
kind of file, but must not change during the copy. No other user may have access to the target.
"""

from __future__ import annotations

import os
from errno import EINVAL, ENOTSUP, ENXIO, EOVERFLOW
from stat import S_ISDIR, S_ISLNK, S_ISREG

from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_beneath, open_regular_at
from pyrunc.kernel.tree import FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    # device and inode of a file with several hard links -> path of its first copy
    Copied = dict[tuple[int, int], str]

_CHUNK_BYTES = 1 << 20
_PROBE_BYTES = 16  # if these are zeros, the whole chunk is compared with zeros
_ZEROS = bytes(_CHUNK_BYTES)
_FILE_BYTES = 4096  # the least that a file takes besides its data
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTRIBUTES = ("security.capability", "system.posix_acl_access", "system.posix_acl_default")


class _FolderCopy:
    """A folder that is being copied.

    - `source`, `copy`: descriptors of the folder and of its copy
    - `path`: the folder's path beneath the target
    - `names`: names in the folder that are not copied yet
    """

    __slots__ = ("copy", "names", "path", "source")

    def __init__(self, source: int, copy: int, name: str, path: str) -> None:
        self.path, self.source = path, os.open(name, FOLDER, dir_fd=source)
        try:
            self.copy = os.open(name, FOLDER, dir_fd=copy)
        except BaseException:
            os.close(self.source)
            raise
        self.names: Iterator[str] = iter(os.listdir(self.source))

    def close(self) -> None:
        os.close(self.source)
        os.close(self.copy)


def _ignore(_: int) -> None:
    pass


def copy_tree(source: int, target: int, tick: Callable[[int], None] = _ignore) -> None:
    """Copy content and attributes of the folder `source` to the empty folder `target`. The caller
    closes both descriptors. Raises OSError, KernelError.

    `tick(size)` is called before each file and folder, and before each piece of at most 1 MiB of
    data. `size`: how many bytes the disk will need, 0 for a piece of zeros. An exception of `tick`
    ends the copy.
    """
    copied: Copied = {}
    stack = [_FolderCopy(source, target, ".", ".")]
    try:
        while stack:
            folder = stack[-1]
            name = next(folder.names, None)
            if name is None:
                # After the content, because each entry that is made in a folder changes its times.
                _copy_attributes_by_fd(os.fstat(folder.source), folder.source, folder.copy)
                stack.pop().close()
                continue
            tick(_FILE_BYTES)
            if S_ISDIR(os.lstat(name, dir_fd=folder.source).st_mode):
                os.mkdir(name, 0o700, dir_fd=folder.copy)
                stack.append(_FolderCopy(folder.source, folder.copy, name, f"{folder.path}/{name}"))
            else:
                _copy(folder, name, target, copied, tick)
    finally:
        for folder in stack:
            folder.close()


def _copy(
    folder: _FolderCopy, name: str, target: int, copied: Copied, tick: Callable[[int], None]
) -> None:
    """Copy a file, symbolic link, device or pipe. If it is a hard link to a file that was copied
    before, make a hard link to that copy."""
    status = os.lstat(name, dir_fd=folder.source)
    identity = (status.st_dev, status.st_ino)
    if identity in copied:
        _link(target, copied[identity], folder.copy, name)
        return
    if S_ISREG(status.st_mode):
        _copy_file(status, folder, name, tick)
    else:
        if S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=folder.source), name, dir_fd=folder.copy)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=folder.copy)
        # By name and without extended attributes: opening a device or a pipe has effects, and
        # `user.*` exists only on files and folders (xattr(7)).
        _copy_attributes_by_name(status, folder.copy, name)
    # Later links to the same inode become hard links of the copy.
    if status.st_nlink > 1:
        copied[identity] = f"{folder.path}/{name}"


def _link(target: int, first: str, folder: int, name: str) -> None:
    # By path, because the first copy's folder may be closed by now: a descriptor for each folder
    # with such files would reach the limit of open files.
    place, _, first_name = first.rpartition("/")
    with closing_fd(open_beneath(target, place)) as parent:
        os.link(first_name, name, src_dir_fd=parent, dst_dir_fd=folder, follow_symlinks=False)


def _copy_file(
    status: os.stat_result, folder: _FolderCopy, name: str, tick: Callable[[int], None]
) -> None:
    with (
        closing_fd(open_regular_at(folder.source, name)) as reading,
        closing_fd(os.open(name, _NEW, 0o600, dir_fd=folder.copy)) as writing,
    ):
        copy_data(reading, writing, status.st_size, tick)
        _copy_attributes_by_fd(status, reading, writing)


def copy_data(reading: int, writing: int, size: int, tick: Callable[[int], None] = _ignore) -> None:
    """Copy `size` bytes of the file `reading` to the empty file `writing`. Holes and long runs of
    zeros become holes, because a sparse file may be large, and not every file system reports its
    holes. Raises OSError.

    `tick` is called before each piece with the number of bytes that the disk will need, 0 for
    zeros. It may raise, which ends the copy.
    """
    at = 0
    while at < size:
        try:
            at = os.lseek(reading, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != ENXIO:
                raise
            break  # only a hole is left
        end = os.lseek(reading, at, os.SEEK_HOLE)
        os.lseek(writing, at, os.SEEK_SET)
        while at < end and (
            done := _copy_part(reading, writing, at, min(end - at, _CHUNK_BYTES), tick)
        ):
            at += done
        at = end
    os.ftruncate(writing, size)


def _copy_part(
    reading: int, writing: int, at: int, length: int, tick: Callable[[int], None]
) -> int:
    """Copy at most `length` bytes from `reading` to `writing`, at the offset `at` of both files.
    The file position of `writing` must be `at` already. Returns the number of bytes copied, 0 at
    the end of `reading`."""
    if not any(os.pread(reading, _PROBE_BYTES, at)):
        content = os.pread(reading, length, at)
        if content == _ZEROS[: len(content)]:
            tick(0)
            os.lseek(writing, len(content), os.SEEK_CUR)
            return len(content)
    tick(length)
    return os.sendfile(writing, reading, at, length)


def _copy_attributes_by_fd(status: os.stat_result, source: int, copy: int) -> None:
    """Copy owner, mode, extended attributes and times. Leave out attributes of the host (trusted.*,
    SELinux labels), attributes that the copy's file system does not support, and attributes with
    ids that our user namespace does not map."""
    # The owner first: chown(2) clears set-user-ID bits and file capabilities.
    _change_owner(status, copy)
    os.fchmod(copy, status.st_mode & 0o7777)
    for name in os.listxattr(source):
        if name.startswith("user.") or name in _ATTRIBUTES:
            try:
                os.setxattr(copy, name, os.getxattr(source, name))
            except OSError as error:
                if error.errno not in (ENOTSUP, EINVAL, EOVERFLOW):
                    raise
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_attributes_by_name(status: os.stat_result, folder: int, name: str) -> None:
    _change_owner(status, name, dir_fd=folder, follow_symlinks=False)
    # A link's mode is not used and cannot be changed (symlink(7)).
    if not S_ISLNK(status.st_mode):
        os.chmod(name, status.st_mode & 0o7777, dir_fd=folder)
    os.utime(
        name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False
    )


def _change_owner(status: os.stat_result, copy: int | str, **where: Any) -> None:
    try:
        os.chown(copy, status.st_uid, status.st_gid, **where)
    except OSError as error:
        # Our user namespace does not map the owner: the copy stays ours.
        if error.errno != EINVAL:
            raise
