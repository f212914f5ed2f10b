"""Pseudo terminals: make one, set and read its size (ioctl_tty(2))."""

from __future__ import annotations

import fcntl
import struct
import termios

from pyrunc.errors import KernelError, kernel_errors

_WINSIZE = struct.Struct("HHHH")  # rows, columns, two pixel sizes that nobody uses


def set_size(fd: int, width: int, height: int) -> None:
    """Tell the terminal, and by SIGWINCH its foreground process group, its size in characters
    (TIOCSWINSZ)."""
    with kernel_errors("ioctl", "TIOCSWINSZ"):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, _WINSIZE.pack(height & 0xFFFF, width & 0xFFFF, 0, 0))


def clear_onlcr(fd: int) -> None:
    """Let a newline that a program writes stay one (termios(3), ONLCR): whoever shows the output
    translates it once more."""
    try:
        attributes = termios.tcgetattr(fd)
        attributes[1] &= ~termios.ONLCR
        termios.tcsetattr(fd, termios.TCSANOW, attributes)
    except termios.error as error:
        raise KernelError("ioctl", "TCSETS", error.args[0]) from None


def size(fd: int) -> tuple[int, int]:
    """(width, height) in characters (TIOCGWINSZ)."""
    with kernel_errors("ioctl", "TIOCGWINSZ"):
        height, width, _, _ = _WINSIZE.unpack(
            fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(_WINSIZE.size))
        )
    return width, height
