"""Opens directories of unpacked layers without following symbolic links."""

from __future__ import annotations

import errno
import os
from typing import Self

from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.path import open_beneath

OPAQUE_XATTR = "trusted.overlay.opaque"
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(root_fd: int, path: bytes) -> int:
    """Open the directory at `path` beneath the directory `root_fd` for reading; the caller closes
    it. Raises KernelError."""
    return open_beneath(root_fd, path or b".", os.O_RDONLY | os.O_DIRECTORY)


def is_opaque(folder: int) -> bool:
    """Return whether a folder of a writable or unpacked layer is an opaque directory
    (trusted.overlay.opaque): overlayfs hides the files of lower layers there. `folder`: a
    descriptor, also one of O_PATH. Raises OSError when the attribute cannot be read, because False
    would show files that the layer hides."""
    try:
        return os.getxattr(f"/proc/self/fd/{folder}", OPAQUE_XATTR) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise


def depth_first_key(path: bytes) -> bytes:
    """Return a sort key that puts each directory right before its contents."""
    return path.replace(b"/", b"\0")


class DirectoryWalker:
    """Opens one directory after the other beneath a root, which no other process may change
    meanwhile. A context manager.

    It takes little time to open a directory, however deep it is, if the caller opens the
    directories in the order of `depth_first_key`.
    """

    def __init__(self, root_fd: int) -> None:
        """`root_fd`: a descriptor of the directory beneath which `open` opens; the caller may close
        it after this call."""
        self._path = b""
        self._fd = os.open(b".", _PLACE, dir_fd=root_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def open(self, path: bytes) -> int:
        """Return an O_PATH descriptor of the directory at `path`, valid until the next call. Raises
        KernelError, for example ENOTDIR if a component of `path` is a file or a symbolic link, and
        EXDEV if one is `.` or `..`."""
        while self._path and not (path == self._path or path.startswith(self._path + b"/")):
            # Safe, because no one else can move a directory of this tree meanwhile.
            self._move(b"..")
            self._path = self._path.rpartition(b"/")[0]
        for name in path[len(self._path) :].split(b"/"):
            if name in (b".", b".."):
                raise KernelError("open", repr(path), errno.EXDEV)
            if name:
                self._move(name)
                self._path = self._path + b"/" + name if self._path else name
        return self._fd

    def _move(self, name: bytes) -> None:
        with kernel_errors("open", repr(name)):
            directory = os.open(name, _PLACE, dir_fd=self._fd)
        os.close(self._fd)
        self._fd = directory
