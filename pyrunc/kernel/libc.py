"""syscall(2) of the C library by ctypes, in the form of `_pyrunc` (cli/front.c): for every
interpreter that is not `pyrunc`'s own."""

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
    """The result, or the negative errno. None is a null pointer; of bytes and bytearrays the
    address is passed."""
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
    """Where its first byte is; the caller keeps it alive and of its size."""
    return ctypes.addressof(_in_place(buffer))


def _in_place(buffer: bytearray) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(buffer)).from_buffer(buffer)
