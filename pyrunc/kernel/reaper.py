"""Sets attributes of the calling process by prctl(2): child subreaper, parent death signal, name.
Makes a pipe that reports SIGCHLD."""

from __future__ import annotations

# not `signal`, which imports enum
import _signal  # type: ignore[import-not-found]
import os

from pyrunc.abi.prctl import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, PR_SET_PDEATHSIG
from pyrunc.kernel.call import path_bytes, syscall


def set_child_subreaper(on: bool = True) -> None:
    """Make the caller a subreaper, whose orphaned descendants become its children
    (PR_SET_CHILD_SUBREAPER). The setting survives execve, but children do not inherit it."""
    syscall("prctl", "PR_SET_CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def set_parent_death_signal(signal: int, parent: int) -> None:
    """Make the kernel send `signal` to the caller when the *thread* that forked it ends
    (PR_SET_PDEATHSIG). Only for children of single-threaded processes.

    `parent`: the pid of the process that forked the caller. If that process has ended already, the
    caller sends itself the signal now, because the kernel would watch the caller's new parent.
    """
    syscall("prctl", "PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, signal, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal)


def open_child_notice() -> int:
    """Return the read end of a pipe that becomes readable when a child of the caller ends
    (SIGCHLD). The caller must empty the pipe by `empty_notice` before each wait."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # A handler must exist for the wakeup descriptor to be written.
    _signal.signal(_signal.SIGCHLD, lambda number, frame: None)
    _signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def empty_notice(fd: int) -> None:
    """Read all that is in the pipe of `open_child_notice`."""
    try:
        while len(os.read(fd, 4096)) == 4096:
            pass
    except BlockingIOError:
        pass


def set_name(name: str) -> None:
    """Set the caller's name in /proc/PID/comm; the kernel stores the first 15 bytes
    (PR_SET_NAME)."""
    syscall("prctl", "PR_SET_NAME", PR_SET_NAME, path_bytes(name) + b"\0", 0, 0, 0)
