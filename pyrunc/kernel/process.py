"""Processes by pidfd: open, signal, wait, fetch a descriptor; when a pid was started; who adopts orphans."""

from __future__ import annotations

import errno
import os

from pyrunc.abi.process import P_PIDFD
from pyrunc.errors import KernelError
from pyrunc.kernel.call import syscall


def open_pidfd(pid: int, flags: int = 0) -> int:
    """pidfd_open(2), close-on-exec; ESRCH when there is no such process. PIDFD_NONBLOCK makes waits not block."""
    return syscall("pidfd_open", f"pid {pid}", pid, flags)


def pidfd_send_signal(pidfd: int, signal: int) -> bool:
    """pidfd_send_signal(2); False when the process is gone. Signal 0 only asks."""
    try:
        syscall("pidfd_send_signal", f"signal {signal}", pidfd, signal, None, 0)
    except KernelError as error:
        if error.errno == errno.ESRCH:
            return False
        raise
    return True


def open_from_process(pidfd: int, number: int) -> int:
    """pidfd_getfd(2): a copy of another process's descriptor. Needs the right to ptrace it."""
    return syscall("pidfd_getfd", f"fd {number}", pidfd, number, 0)


class Exit:
    """How a process ended: `code` as shells say it (128 + signal when it was killed), `signal` or None."""

    __slots__ = ("code", "pid", "signal")

    def __init__(self, pid: int, code: int, signal: int | None) -> None:
        self.pid, self.code, self.signal = pid, code, signal

    def __repr__(self) -> str:
        return f"Exit(pid={self.pid}, code={self.code}, signal={self.signal})"


def waitid(pidfd: int, *, block: bool = True, keep: bool = False) -> Exit | None:
    """waitid(P_PIDFD, WEXITED) of a child; None when it still runs and `block` is false. `keep` leaves the zombie.

    ECHILD: not a child of ours, or reaped already.
    """
    options = os.WEXITED | (0 if block else os.WNOHANG) | (os.WNOWAIT if keep else 0)
    try:
        result = os.waitid(P_PIDFD, pidfd, options)
    except BlockingIOError:
        return None
    except OSError as error:
        raise KernelError("waitid", f"pidfd {pidfd}", error.errno or 0) from None
    if result is None or not result.si_pid:
        return None
    if result.si_code == os.CLD_EXITED:
        return Exit(result.si_pid, result.si_status, None)
    return Exit(result.si_pid, 128 + result.si_status, result.si_status)


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from field 3 (state) on, so field n is at index n - 3; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            content = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may itself contain parentheses and blanks.
    return content[content.rindex(b")") + 2 :].decode().split()


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (field 22 of /proc/PID/stat); None when it is gone."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def state(pid: int) -> str | None:
    """The state's letter (R, S, D, Z, T, …); None when there is no such process."""
    fields = stat_fields(pid)
    return fields[0] if fields else None


def set_child_subreaper(on: bool = True) -> None:
    """prctl(PR_SET_CHILD_SUBREAPER): orphans among our descendants become our children."""
    import prctl  # here, because it takes 1.4 ms and most callers need no prctl

    prctl.set_child_subreaper(on)
