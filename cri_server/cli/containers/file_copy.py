"""Files from folder to folder by descriptors: no link is followed on either side, for one of them
may be a container's doing, which may change while we look. A file appears whole: it grows under
another name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator

from pyrunc.atomic_file import write_all
from pyrunc.errors import WrongState
from pyrunc.kernel.path import open_regular_at

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
CHUNK_BYTES = 1 << 20


class Copy:
    """How it is copied: `count` is told the bytes, `warn` what is left out; `owner` is whose the
    copies are (None: ours).

    Set-user-ID and set-group-ID bits are kept only with the owners, whose they are.
    """

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

    def one(self, source: int, name: str, target: int, new: str) -> None:
        """`name` in the folder `source`, with all beneath it, as `new` in the folder `target`.
        Raises Error, OSError."""
        status = os.lstat(name, dir_fd=source)
        if not stat.S_ISDIR(status.st_mode):
            self._leaf(status, source, name, target, new)
            return
        below = self.folder(target, new)
        try:
            above = os.open(name, FOLDER, dir_fd=source)
            try:
                self.contents(above, below)
            finally:
                os.close(above)
            self.finish(status, below)
        finally:
            os.close(below)

    def contents(self, source: int, target: int) -> None:
        """All that is in a folder into another one; with two descriptors for each level. Raises
        Error, OSError."""
        way: list[tuple[os.stat_result | None, int, int, Iterator[str]]] = []
        way.append((None, os.dup(source), os.dup(target), iter(os.listdir(source))))
        try:
            while way:
                status, above, below, names = way[-1]
                name = next(names, None)
                if name is None:
                    if status is not None:
                        self.finish(status, below)
                    way.pop()
                    os.close(above)
                    os.close(below)
                    continue
                found = os.lstat(name, dir_fd=above)
                if not stat.S_ISDIR(found.st_mode):
                    self._leaf(found, above, name, below, name)
                    continue
                made = self.folder(below, name)
                try:
                    entered = os.open(name, FOLDER, dir_fd=above)
                except BaseException:
                    os.close(made)
                    raise
                way.append((found, entered, made, iter(os.listdir(entered))))
        finally:
            for _, above, below, _ in way:
                os.close(above)
                os.close(below)

    def _leaf(self, status: os.stat_result, source: int, name: str, target: int, new: str) -> None:
        if stat.S_ISLNK(status.st_mode):
            self.link(status, os.readlink(name, dir_fd=source), target, new)
        elif stat.S_ISREG(status.st_mode):
            reading = open_regular_at(source, name)
            try:
                self.file(status, iter(lambda: os.read(reading, CHUNK_BYTES), b""), target, new)
            finally:
                os.close(reading)
        else:
            self._warn(f"{name}: neither a file, a folder nor a link, left out")

    # -- what is made

    def folder(self, target: int, name: str, mode: int = 0o700) -> int:
        """A folder that is there or made now, to be closed by the caller. Raises WrongState,
        OSError."""
        try:
            os.mkdir(name, mode, dir_fd=target)
        except FileExistsError:
            pass
        try:
            return os.open(name, FOLDER, dir_fd=target)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise WrongState(f"{name!r} is there and is no folder") from None
            raise

    def finish(self, status: os.stat_result, descriptor: int) -> None:
        """Owner, mode and times of what was made and filled. Raises OSError."""
        owner = self._ids(status)
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, status.st_mode & (0o7777 if self._keep_owner else 0o1777))
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))

    def file(
        self, status: os.stat_result, content: Iterable[bytes], target: int, name: str
    ) -> None:
        """A regular file; one of this name is replaced when all of it is here. Raises WrongState,
        OSError."""
        growing = f".{os.urandom(8).hex()}.part"
        descriptor = os.open(growing, NEW, 0o600, dir_fd=target)
        try:
            for part in content:
                write_all(descriptor, part)
                self._count(len(part))
            self.finish(status, descriptor)
            os.rename(growing, name, src_dir_fd=target, dst_dir_fd=target)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                self._over(target, growing, name)  # something is mounted there, such as /etc/hosts
            os.unlink(growing, dir_fd=target)
            if isinstance(error, IsADirectoryError):
                raise WrongState(f"{name!r} is there and is a folder") from None
            if not (isinstance(error, OSError) and error.errno == errno.EBUSY):
                raise
        finally:
            os.close(descriptor)

    def _over(self, target: int, growing: str, name: str) -> None:
        reading = open_regular_at(target, growing)
        try:
            writing = open_regular_at(target, name, os.O_WRONLY | os.O_TRUNC)
            try:
                while part := os.read(reading, CHUNK_BYTES):
                    write_all(writing, part)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def link(self, status: os.stat_result, to: str, target: int, name: str) -> None:
        """A symbolic link; what is there and is no folder is replaced. Raises WrongState, OSError."""
        growing = f".{os.urandom(8).hex()}.part"
        os.symlink(to, growing, dir_fd=target)
        try:
            owner = self._ids(status)
            if owner is not None:
                os.chown(growing, *owner, dir_fd=target, follow_symlinks=False)
            os.rename(growing, name, src_dir_fd=target, dst_dir_fd=target)
        except BaseException as error:
            os.unlink(growing, dir_fd=target)
            if isinstance(error, IsADirectoryError):
                raise WrongState(f"{name!r} is there and is a folder") from None
            raise

    def _ids(self, status: os.stat_result) -> tuple[int, int] | None:
        return (status.st_uid, status.st_gid) if self._keep_owner else self._owner
