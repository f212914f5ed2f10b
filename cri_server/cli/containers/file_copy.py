"""Copies files and folders between two open folders.

Follows no symbolic link, because a container may replace its files by links during the copy. Each
file is written under a temporary name and then renamed, so that it appears complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pyrunc.atomic_file import write_all
from pyrunc.errors import WrongState
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_regular_at

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
CHUNK_BYTES = 1 << 20


class _Level(NamedTuple):
    """A folder that is being copied. `source` and `target`: descriptors of the folder and its copy;
    `names`: the names not copied yet; `status`: owner, mode and times for the copy, None to leave
    them unchanged."""

    status: os.stat_result | None
    source: int
    target: int
    names: Iterator[str]

    def close(self) -> None:
        """Close the descriptors `source` and `target`."""
        os.close(self.source)
        os.close(self.target)


class Copy:
    """Copies files and folders. Calls `count` with the number of bytes of each write, and `warn`
    with a message for each skipped file.

    With `keep_owner` each copy gets its source's owner, set-user-ID bit and set-group-ID bit.
    Without `keep_owner` the copies belong to `owner` (user id, group id), or to this user if
    `owner` is None, and lack these bits."""

    def __init__(
        self,
        count: Callable[[int], None],
        warn: Callable[[str], None],
        *,
        keep_owner: bool = False,
        owner: tuple[int, int] | None = None,
    ) -> None:
        self._count = count
        self._warn = warn
        self._keep_owner = keep_owner
        self._owner = owner

    def copy_entry(self, source: int, name: str, target: int, new: str) -> None:
        """Copy the file or folder `name` in the open folder `source` to `new` in the open folder
        `target`. Raises Error, OSError."""
        status = os.lstat(name, dir_fd=source)
        if stat.S_ISDIR(status.st_mode):
            self._copy_tree(self._enter(status, source, name, target, new))
        else:
            self._leaf(status, source, name, target, new)

    def copy_contents(self, source: int, target: int) -> None:
        """Copy everything in the open folder `source` into the open folder `target`. Raises Error,
        OSError."""
        self._copy_tree(_Level(None, os.dup(source), os.dup(target), iter(os.listdir(source))))

    def _copy_tree(self, top: _Level) -> None:
        # A recursion would fail: a container can nest folders deeper than Python's stack.
        levels = [top]
        try:
            while levels:
                level = levels[-1]
                name = next(level.names, None)
                if name is None:
                    if level.status is not None:
                        self.finish(level.status, level.target)
                    levels.pop().close()
                    continue
                status = os.lstat(name, dir_fd=level.source)
                if stat.S_ISDIR(status.st_mode):
                    levels.append(self._enter(status, level.source, name, level.target, name))
                else:
                    self._leaf(status, level.source, name, level.target, name)
        finally:
            for level in levels:
                level.close()

    def _enter(
        self, status: os.stat_result, source: int, name: str, target: int, new: str
    ) -> _Level:
        """Open the folder `name` in the open folder `source`, and create its copy `new` in the open
        folder `target`. `status`: the folder's status, for the copy."""
        copy = self.folder(target, new)
        try:
            entered = os.open(name, FOLDER, dir_fd=source)
        except BaseException:
            os.close(copy)
            raise
        return _Level(status, entered, copy, iter(os.listdir(entered)))

    def _leaf(self, status: os.stat_result, source: int, name: str, target: int, new: str) -> None:
        if stat.S_ISLNK(status.st_mode):
            self.link(status, os.readlink(name, dir_fd=source), target, new)
        elif stat.S_ISREG(status.st_mode):
            with closing_fd(open_regular_at(source, name)) as reading:
                self.file(status, iter(lambda: os.read(reading, CHUNK_BYTES), b""), target, new)
        else:
            self._warn(f"{name}: skipped, neither a file, a folder nor a link")

    # -- creation of files, folders and links

    def folder(self, target: int, name: str, mode: int = 0o700) -> int:
        """Create the folder `name` in `target` unless it exists, and return its descriptor. Raises
        OSError, and WrongState if `name` exists and is no folder."""
        # The folder is closed to others until `finish`, when its contents have their owners and
        # modes.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=target)
        try:
            return os.open(name, FOLDER, dir_fd=target)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise WrongState(f"{name!r} exists and is not a folder") from None
            raise

    def finish(self, status: os.stat_result, descriptor: int) -> None:
        """Set owner, mode and times of a complete file or folder from `status`. Raises OSError."""
        # The mode comes after the owner: chown(2) clears set-user-ID and set-group-ID bits of
        # programs.
        owner = self._ids(status)
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, status.st_mode & (0o7777 if self._keep_owner else 0o1777))
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))

    def file(
        self, status: os.stat_result, content: Iterable[bytes], target: int, name: str
    ) -> None:
        """Create or replace the regular file `name` in the open folder `target`, with the owner,
        mode and times in `status`. Raises OSError, and WrongState if `name` is a folder."""
        # A name that a container cannot guess: it could otherwise put a link there beforehand.
        partial = f".{os.urandom(8).hex()}.part"
        descriptor = os.open(partial, NEW, 0o600, dir_fd=target)
        try:
            for part in content:
                write_all(descriptor, part)
                self._count(len(part))
            self.finish(status, descriptor)
            os.rename(partial, name, src_dir_fd=target, dst_dir_fd=target)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                # The name is a mount point, such as /etc/hosts, and cannot be replaced.
                self._overwrite(target, partial, name)
            os.unlink(partial, dir_fd=target)
            if isinstance(error, IsADirectoryError):
                raise WrongState(f"{name!r} exists and is a folder") from None
            if not (isinstance(error, OSError) and error.errno == errno.EBUSY):
                raise
        finally:
            os.close(descriptor)

    def _overwrite(self, target: int, partial: str, name: str) -> None:
        with (
            closing_fd(open_regular_at(target, partial)) as reading,
            closing_fd(open_regular_at(target, name, os.O_WRONLY | os.O_TRUNC)) as writing,
        ):
            while part := os.read(reading, CHUNK_BYTES):
                write_all(writing, part)

    def link(self, status: os.stat_result, to: str, target: int, name: str) -> None:
        """Create the symbolic link `name` in the open folder `target`, pointing to `to`, with the
        owner in `status`. Replaces an existing file or link. Raises OSError, and WrongState if
        `name` is a folder."""
        partial = f".{os.urandom(8).hex()}.part"
        os.symlink(to, partial, dir_fd=target)
        try:
            owner = self._ids(status)
            if owner is not None:
                os.chown(partial, *owner, dir_fd=target, follow_symlinks=False)
            os.rename(partial, name, src_dir_fd=target, dst_dir_fd=target)
        except BaseException as error:
            os.unlink(partial, dir_fd=target)
            if isinstance(error, IsADirectoryError):
                raise WrongState(f"{name!r} exists and is a folder") from None
            raise

    def _ids(self, status: os.stat_result) -> tuple[int, int] | None:
        return (status.st_uid, status.st_gid) if self._keep_owner else self._owner
