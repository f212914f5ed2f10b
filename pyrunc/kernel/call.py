"""The one door to libc: raw system calls by name, with errno turned into `KernelError` that names call and object.

`syscall` is enough for almost everything: it does not depend on what the C library happens to wrap. Pointers are passed as
bytes (read by the kernel) or ctypes buffers (written by the kernel).
"""

from __future__ import annotations

import ctypes
import errno
import os

from pyrunc.abi.arch import arch
from pyrunc.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_NUMBERS = arch().syscalls
_long, _pointer = ctypes.c_long, ctypes.c_void_p


def raw(name: str, *args: int | bytes | ctypes.Array[Any] | ctypes.Structure | None) -> int:
    """The system call; on failure the negative errno. EINTR is returned like any other."""
    values: list[object] = [_long(_NUMBERS[name])]
    for arg in args:
        if arg is None:
            values.append(_pointer(None))
        elif isinstance(arg, int):
            values.append(_long(arg))
        elif isinstance(arg, bytes):
            values.append(arg)
        else:
            values.append(ctypes.byref(arg))
    result: int = _syscall(*values)
    return -ctypes.get_errno() if result == -1 else result


def syscall(name: str, subject: str, *args: int | bytes | ctypes.Array[Any] | ctypes.Structure | None) -> int:
    """The system call, repeated on EINTR; `KernelError(name, subject, errno)` on failure."""
    while True:
        result = raw(name, *args)
        if result >= 0:
            return result
        if result != -errno.EINTR:
            raise KernelError(name, subject, -result)


def path_bytes(path: str | bytes | os.PathLike[str]) -> bytes:
    """A path as the kernel takes it. KernelError EINVAL for a NUL inside, which would silently shorten it."""
    raw_path = os.fsencode(path)
    if b"\0" in raw_path:
        raise KernelError("path", repr(path), errno.EINVAL, "NUL character")
    return raw_path


def buffer(size: int) -> ctypes.Array[ctypes.c_char]:
    """Zeroed memory for a call to write into; `.raw` has the bytes."""
    return ctypes.create_string_buffer(size)


def quoted(path: str | bytes | os.PathLike[str]) -> str:
    """A path in an error's words."""
    return f"'{os.fsdecode(path)}'"
