"""Settings of pseudo terminals (ioctl_tty(2))."""

from __future__ import annotations

import fcntl
import struct
import termios

from pyrunc.errors import KernelError, kernel_errors

_WINSIZE = struct.Struct("HHHH")  # rows, columns, and two sizes in pixels, which stay unused


def set_size(fd: int, width: int, height: int) -> None:
    """Set the terminal's size in characters; its foreground process group gets SIGWINCH
    (TIOCSWINSZ)."""
    with kernel_errors("ioctl", "TIOCSWINSZ"):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, _WINSIZE.pack(height & 0xFFFF, width & 0xFFFF, 0, 0))


def clear_onlcr(fd: int) -> None:
    """Stop the terminal from turning a newline into CR LF (termios(3), ONLCR), because the client's
    terminal does that."""
    try:
        attributes = termios.tcgetattr(fd)
        attributes[1] &= ~termios.ONLCR
        termios.tcsetattr(fd, termios.TCSANOW, attributes)
    except termios.error as error:
        raise KernelError("ioctl", "TCSETS", error.args[0]) from None


def size(fd: int) -> tuple[int, int]:
    """Return the terminal's (width, height) in characters (TIOCGWINSZ)."""
    with kernel_errors("ioctl", "TIOCGWINSZ"):
        height, width, _, _ = _WINSIZE.unpack(
            fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(_WINSIZE.size))
        )
    return width, height
