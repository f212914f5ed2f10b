"""The one door to libc: raw system calls by name, with errno turned into `KernelError` that names
call and object.

`syscall` is enough for almost everything: it does not depend on what the C library happens to wrap.
Pointers are passed as bytes (read by the kernel) or `buffer`s (written by the kernel). `pyrunc`'s
own program (cli/front.c) brings the call itself; elsewhere it is ctypes', which takes 3 ms to load.
"""

from __future__ import annotations

import errno
import os

from pyrunc.abi.arch import arch
from pyrunc.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.kernel.libc import address, call

    Argument = int | bytes | bytearray | None
else:
    try:
        from _pyrunc import address, call
    except ImportError:
        from pyrunc.kernel.libc import address, call

__all__ = ["address", "buffer", "path_bytes", "quoted", "raw", "syscall"]

_NUMBERS = arch().syscalls


def raw(name: str, *args: Argument) -> int:
    """The system call; on failure the negative errno. EINTR is returned like any other."""
    return call(_NUMBERS[name], *args)


def syscall(name: str, subject: str, *args: Argument) -> int:
    """The system call, repeated on EINTR; `KernelError(name, subject, errno)` on failure."""
    while True:
        result = raw(name, *args)
        if result >= 0:
            return result
        if result != -errno.EINTR:
            raise KernelError(name, subject, -result)


def path_bytes(path: str | bytes | os.PathLike[str]) -> bytes:
    """A path as the kernel takes it. KernelError EINVAL for a NUL inside, which would silently
    shorten it."""
    raw_path = os.fsencode(path)
    if b"\0" in raw_path:
        raise KernelError("path", repr(path), errno.EINVAL, "NUL character")
    return raw_path


def buffer(content: int | bytes) -> bytearray:
    """Memory for a call to write into: so many zeros, or these bytes. `address` tells where it is."""
    return bytearray(content)


def quoted(path: str | bytes | os.PathLike[str]) -> str:
    """A path in an error's words."""
    return f"'{os.fsdecode(path)}'"
