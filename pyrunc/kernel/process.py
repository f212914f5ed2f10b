"""Reads files of /proc/PID; sends signals and waits by pidfd; copies descriptors of other
processes.

Imports only modules that each interpreter has loaded at its start, because `pyrunc` and the shim's
forks must import this module quickly.
"""

from __future__ import annotations

import os

# signal brings enum
from _signal import SIGKILL, pidfd_send_signal  # type: ignore[import-not-found]

from pyrunc.errors import KernelError

KILLED_S = 1.0  # how long a killed process is waited for
LONGEST_WAIT_MS = (1 << 31) - 1  # poll(2) takes an int: 24 days

# linux/pidfd.h. struct pidfd_info has at least 64 bytes: u64 mask first, s32 exit_code last.
_PIDFD_GET_INFO, _PIDFD_INFO_BYTES, _PIDFD_INFO_EXIT = 0xC040FF0B, 64, 1 << 3


class Stat:
    """Fields of /proc/PID/stat (proc_pid_stat(5)).

    - `start_time`: in clock ticks since boot
    - `resident`: in pages
    - `wait_status`: only for a zombie: how it ended, in the form of waitpid(2). 0 if the caller may
      not ptrace the zombie.
    """

    __slots__ = (
        "major_faults",
        "minor_faults",
        "parent",
        "resident",
        "session",
        "start_time",
        "state",
        "wait_status",
    )

    def __init__(self, text: bytes) -> None:
        # The name is in parentheses and may itself contain parentheses and blanks.
        fields = text[text.rindex(b")") + 2 :].split()
        self.state = fields[0].decode()
        self.parent, self.session = int(fields[1]), int(fields[3])
        self.minor_faults, self.major_faults = int(fields[7]), int(fields[9])
        self.start_time, self.resident = int(fields[19]), int(fields[21])
        self.wait_status = int(fields[49])

    @property
    def alive(self) -> bool:
        """Return whether the process runs. False for a zombie."""
        return self.state not in "ZXx"


def stat(pid: int) -> Stat | None:
    """Return the fields of /proc/PID/stat, also of a zombie; None when no process has the pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return Stat(file.read(4096) or b"")
    except (FileNotFoundError, ProcessLookupError):
        return None


def status_fields(pid: int | str) -> dict[bytes, bytes]:
    """Return the fields of /proc/PID/status (proc_pid_status(5)). Raises OSError."""
    from pyrunc.kernel.fd import read_file

    # Not text and not splitlines(): the kernel escapes only newline and backslash in Name, which
    # the process sets (PR_SET_NAME). A \r in it would begin a forged field.
    lines = read_file(f"/proc/{pid}/status").split(b"\n")
    return {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}


def interface_counters(pid: int) -> dict[str, list[int]]:
    """Return a dict: network interface -> its counters, for all interfaces except `lo` in the
    network namespace of the process. The counters are in the order of the columns of
    /proc/PID/net/dev (proc_pid_net(5)). Bytes of a name that are not UTF-8 are escaped. Empty after
    the process's exit."""
    from pyrunc.kernel.fd import read_file

    # The file shows the namespace of PID: setns(2) would need rights that a reader need not have.
    try:
        lines = read_file(f"/proc/{pid}/net/dev").split(b"\n")[2:-1]
    except OSError:
        return {}
    counters = {}
    for line in lines:
        name, _, columns = line.partition(b":")
        text = name.strip(b" ").decode("utf-8", "backslashreplace")
        counters[text] = [int(column) for column in columns.split()]
    counters.pop("lo", None)
    return counters


def alive_since(pid: int) -> int | None:
    """Return the start time of a living process in clock ticks since boot. None for a zombie, and
    when no process has the pid. The pid and the start time together identify a process for ever."""
    process = stat(pid)
    return process.start_time if process is not None and process.alive else None


def wait_status(pid: int, start_time: int, pidfd: int) -> int | None:
    """Return the wait status (waitpid(2)) of a process that is not our child. None if the process
    runs, or if the kernel does not show its wait status.

    The status of a zombie is read from /proc. If the parent has reaped the process, its status is
    read from the pidfd (PIDFD_INFO_EXIT, Linux 6.15).
    """
    process = stat(pid)
    if process is not None and process.start_time == start_time:
        return None if process.alive else process.wait_status
    from fcntl import ioctl

    info = bytearray(_PIDFD_INFO_EXIT.to_bytes(8, "little").ljust(_PIDFD_INFO_BYTES, b"\0"))
    try:
        ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    has_exit = int.from_bytes(info[:8], "little") & _PIDFD_INFO_EXIT
    return int.from_bytes(info[-4:], "little") if has_exit else None


def open_pidfd(pid: int, start_time: int) -> int | None:
    """Open a pidfd of the process with this pid and start time, which the caller closes. None when
    no such process is alive. Raises KernelError."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise KernelError.of(error, "pidfd_open", str(pid)) from None
    # Checked after the open: a process that has this pid and start time now had them then, too.
    if alive_since(pid) == start_time:
        return pidfd
    os.close(pidfd)
    return None


def send_signal(pidfd: int, number: int) -> bool:
    """Send a signal by pidfd_send_signal(2); False when the process has ended. Raises
    KernelError."""
    try:
        pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise KernelError.of(error, "pidfd_send_signal", str(number)) from None
    return True


def wait_end(pidfd: int, timeout_s: float | None = None) -> bool:
    """Wait until a process has ended; a zombie has ended. Return False if the process has not ended
    after `timeout_s` seconds."""
    from select import POLLIN, poll

    ended = poll()
    ended.register(pidfd, POLLIN)
    limit = None if timeout_s is None else min(timeout_s * 1000, LONGEST_WAIT_MS)
    return bool(ended.poll(limit))


def wait_child(pid: int, timeout_s: float | None) -> int | None:
    """Wait for the end of our child and reap it. Return its exit code, or the negative number of
    the signal that ended it. A child that has not ended within `timeout_s` seconds is killed; the
    result is then None. Raises KernelError, OSError."""
    pidfd = os.pidfd_open(pid)  # The child is not reaped, so no other process has its pid.
    try:
        in_time = wait_end(pidfd, timeout_s)
        if not in_time:
            send_signal(pidfd, SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(status) if in_time else None


def kill_and_reap(pidfd: int) -> None:
    """Send SIGKILL to our child, wait at most `KILLED_S` seconds for its end, and reap it. Does
    nothing when the child was reaped already. A child that has not ended in time is not reaped."""
    send_signal(pidfd, SIGKILL)
    # A process that waits for storage (uninterruptible sleep) ends only when that answers, and a
    # shim has other pods to serve meanwhile.
    if not wait_end(pidfd, KILLED_S):
        return
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        pass


def open_from_process(pidfd: int, number: int) -> int:
    """Return a copy of the descriptor `number` of another process (pidfd_getfd(2)). Needs the right
    to ptrace that process. Raises KernelError."""
    from pyrunc.kernel.call import syscall

    return syscall("pidfd_getfd", f"fd {number}", pidfd, number, 0)
