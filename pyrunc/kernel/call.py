"""Makes raw system calls by name. An errno becomes a `KernelError` that names the call and its
object.

`syscall` can make calls that the C library does not wrap. Pointers are passed as bytes, which the
kernel reads, or as a `buffer`, which the kernel writes. The interpreter of the executable `pyrunc`
(cli/front.c) has a built-in function that makes raw calls. Other interpreters use ctypes, which
takes 3 ms to load.
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
    """Make the system call `name`; returns its result, or the negative errno, EINTR included."""
    return call(_NUMBERS[name], *args)


def syscall(name: str, subject: str, *args: Argument) -> int:
    """Make the system call `name`, repeat it after EINTR, and return its result. On failure raises
    KernelError(name, subject, errno)."""
    while True:
        result = raw(name, *args)
        if result >= 0:
            return result
        # PEP 475 repeats the standard library's calls only, not those that are made here.
        if result != -errno.EINTR:
            raise KernelError(name, subject, -result)


def path_bytes(path: str | bytes | os.PathLike[str]) -> bytes:
    """Return a path as bytes for the kernel. Raises KernelError (EINVAL) for a path with a NUL,
    where the kernel would cut the path."""
    raw_path = os.fsencode(path)
    if b"\0" in raw_path:
        raise KernelError("path", repr(path), errno.EINVAL, "NUL character")
    return raw_path


def buffer(content: int | bytes) -> bytearray:
    """Return memory that a system call can write to. `content`: its initial bytes, or how many
    zero bytes it has. The function `address` returns its address."""
    return bytearray(content)


def quoted(path: str | bytes | os.PathLike[str]) -> str:
    """Return a path in quotes, for an error's text."""
    return f"'{os.fsdecode(path)}'"
