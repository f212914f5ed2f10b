"""Resets attributes that a process inherits by fork(2) and execve(2): scheduling, core dump filter,
I/O priority, personality, memory policy, session keyring, and settings of prctl(2)."""

from __future__ import annotations

import os
from errno import EINVAL, ENOSYS, EPERM

from pyrunc.abi.prctl import (
    KEYCTL_JOIN_SESSION_KEYRING,
    MPOL_DEFAULT,
    PR_MCE_KILL,
    PR_MCE_KILL_CLEAR,
    PR_SET_IO_FLUSHER,
    PR_SET_MEMORY_MERGE,
    PR_SET_SECUREBITS,
    PR_SET_THP_DISABLE,
    PR_SET_TIMERSLACK,
)
from pyrunc.abi.process import IOPRIO_WHO_PROCESS
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.call import syscall
from pyrunc.kernel.fd import read_file, write_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TIMER_SLACK_NS = 50_000  # init/init_task.c
COREDUMP_FILTER = "/proc/{}/coredump_filter"
# This kernel does not have the setting, or we may not change it.
_UNCHANGEABLE = (EINVAL, ENOSYS, EPERM)
# The name of a system call, its object in an error's text, its arguments.
_CALLS: tuple[tuple[str, str, *tuple[int, ...]], ...] = (
    ("ioprio_set", "none", IOPRIO_WHO_PROCESS, 0, 0),
    ("personality", "PER_LINUX", 0),  # addresses randomised
    ("set_mempolicy", "MPOL_DEFAULT", MPOL_DEFAULT, 0, 0),
    # A new session keyring, nameless and empty. Otherwise an exec could list the server's keys,
    # also those that only their possessor may see.
    ("keyctl", "KEYCTL_JOIN_SESSION_KEYRING", KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0),
    # The argument 0 would set the value that the process had at its start, which is inherited, too.
    ("prctl", "PR_SET_TIMERSLACK", PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0),
    ("prctl", "PR_SET_THP_DISABLE", PR_SET_THP_DISABLE, 0, 0, 0, 0),
    ("prctl", "PR_SET_MEMORY_MERGE", PR_SET_MEMORY_MERGE, 0, 0, 0, 0),  # Linux 6.4
    # The machine's setting decides when corrupted memory kills.
    ("prctl", "PR_MCE_KILL", PR_MCE_KILL, PR_MCE_KILL_CLEAR, 0, 0, 0),
    ("prctl", "PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, 0, 0, 0, 0),  # needs CAP_SYS_RESOURCE
    # The default: root has capabilities, and loses them by a change of user (capabilities(7)).
    ("prctl", "PR_SET_SECUREBITS", PR_SET_SECUREBITS, 0, 0, 0, 0),
)


def reset_inherited() -> None:
    """Reset the inherited attributes of the calling process to the kernel's defaults. Skips an
    attribute that this kernel lacks (EINVAL, ENOSYS) or does not let us change (EPERM). Raises
    KernelError."""
    _unless_refused(_reset_scheduling)
    _unless_refused(_reset_core_dumps)
    for arguments in _CALLS:
        _unless_refused(syscall, *arguments)


def _unless_refused(reset: Callable[..., object], *arguments: str | int) -> None:
    try:
        reset(*arguments)
    except KernelError as error:
        if error.errno not in _UNCHANGEABLE:
            raise


def _reset_scheduling() -> None:
    """Set SCHED_OTHER with nice value 0, without SCHED_RESET_ON_FORK (sched(7))."""
    with kernel_errors("sched_setscheduler", "SCHED_OTHER, nice 0"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _reset_core_dumps() -> None:
    """Set this process's core dump filter (/proc/PID/coredump_filter, core(5)) to the filter of the
    machine's first process."""
    try:
        machines = read_file(COREDUMP_FILTER.format(1))
        # The file is read as hexadecimal digits without a prefix, and written in C's notation,
        # where such digits are decimal or octal (proc_coredump_filter_write, fs/proc/base.c).
        write_once(COREDUMP_FILTER.format("self"), b"0x" + machines.strip())
    except OSError as error:
        raise KernelError.of(error, "open", f"'{error.filename}'") from None
