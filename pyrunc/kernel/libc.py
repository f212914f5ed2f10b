"""Makes system calls by ctypes and the C library's syscall(2), for an ordinary Python interpreter.
The interpreter in the executable `pyrunc` has the same functions in its built-in module `_pyrunc`
(cli/front.c)."""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_syscall: Callable[..., int] = _libc.syscall
_syscall.restype = ctypes.c_long  # type: ignore[attr-defined]
_long, _pointer = ctypes.c_long, ctypes.c_void_p


def call(number: int, *args: int | bytes | bytearray | None) -> int:
    """Make a system call. Returns its result, or the negative errno. None becomes a null pointer;
    bytes and bytearrays are passed by their address."""
    # ctypes passes a plain int to a variadic function as a C int, which has 32 bits.
    values: list[object] = [_long(number)]
    for arg in args:
        if arg is None:
            values.append(_pointer(None))
        elif isinstance(arg, int):
            values.append(_long(arg))
        elif isinstance(arg, bytes):
            values.append(arg)
        else:
            values.append(ctypes.byref(_in_place(arg)))
    result = _syscall(*values)
    return -ctypes.get_errno() if result == -1 else result


def address(buffer: bytearray) -> int:
    """Return the address of the buffer's first byte. While the address is in use, the caller must
    keep the buffer alive and must not resize it."""
    return ctypes.addressof(_in_place(buffer))


def _in_place(buffer: bytearray) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(buffer)).from_buffer(buffer)
