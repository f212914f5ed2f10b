"""The state of pipes (pipe(7))."""

from __future__ import annotations

import fcntl
import sys
import termios

_INT = bytes(4)


def unread_bytes(fd: int) -> int:
    """Return how many bytes a pipe holds, of which `fd` is the reading end (FIONREAD)."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, _INT), sys.byteorder)
