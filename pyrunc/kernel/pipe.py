"""The state of pipes (pipe(7))."""

from __future__ import annotations

import fcntl
import sys
import termios

_INT = bytes(4)


def unread_bytes(fd: int) -> int:
    """Return the number of unread bytes in the pipe whose reading end is `fd` (FIONREAD)."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, _INT), sys.byteorder)
