"""Resets what fork(2) and execve(2) inherit and no other setting changes: each function gives the
calling process the kernel's default.

All raise KernelError. EINVAL: this kernel does not have the setting, so nothing is inherited.
"""

from __future__ import annotations

import os

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
from pyrunc.kernel.fd import write_once

TIMER_SLACK_NS = 50_000  # init/init_task.c
COREDUMP_FILTER = "/proc/{}/coredump_filter"


def reset_scheduling() -> None:
    """Set SCHED_OTHER with nice value 0, without SCHED_RESET_ON_FORK, and no I/O priority:
    sched(7), ioprio_set(2)."""
    with kernel_errors("sched_setscheduler", "SCHED_OTHER, nice 0"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    syscall("ioprio_set", "none", IOPRIO_WHO_PROCESS, 0, 0)


def reset_timer_slack() -> None:
    """Reset PR_SET_TIMERSLACK. Its argument 0 would set the value that the process had at its
    start, which is inherited, too."""
    syscall("prctl", "PR_SET_TIMERSLACK", PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


def reset_personality() -> None:
    """Reset personality(2): PER_LINUX, addresses randomised."""
    syscall("personality", "PER_LINUX", 0)


def reset_huge_pages() -> None:
    """Allow transparent huge pages again: PR_SET_THP_DISABLE."""
    syscall("prctl", "PR_SET_THP_DISABLE", PR_SET_THP_DISABLE, 0, 0, 0, 0)


def reset_memory_merge() -> None:
    """Reset PR_SET_MEMORY_MERGE (Linux 6.4): same-page merging of all memory."""
    syscall("prctl", "PR_SET_MEMORY_MERGE", PR_SET_MEMORY_MERGE, 0, 0, 0, 0)


def reset_memory_errors() -> None:
    """Reset PR_MCE_KILL: the machine's setting decides when corrupted memory kills."""
    syscall("prctl", "PR_MCE_KILL", PR_MCE_KILL, PR_MCE_KILL_CLEAR, 0, 0, 0)


def reset_io_flusher() -> None:
    """Reset PR_SET_IO_FLUSHER, which only a process with CAP_SYS_RESOURCE may set."""
    syscall("prctl", "PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, 0, 0, 0, 0)


def reset_secure_bits() -> None:
    """Reset PR_SET_SECUREBITS: root has capabilities, and a change of user loses them
    (capabilities(7))."""
    syscall("prctl", "PR_SET_SECUREBITS", PR_SET_SECUREBITS, 0, 0, 0, 0)


def reset_memory_policy() -> None:
    """Reset set_mempolicy(2): MPOL_DEFAULT."""
    syscall("set_mempolicy", "MPOL_DEFAULT", MPOL_DEFAULT, 0, 0)


def reset_core_dumps() -> None:
    """Set the contents of core dumps (/proc/PID/coredump_filter, core(5)) as the machine's first
    process has them."""
    try:
        with open(COREDUMP_FILTER.format(1), "rb", buffering=0) as file:
            machines = file.read(16) or b""
        # The file is read as hexadecimal digits without a prefix, and written in C's notation,
        # where such digits are decimal or octal (proc_coredump_filter_write, fs/proc/base.c).
        write_once(COREDUMP_FILTER.format("self"), b"0x" + machines.strip())
    except OSError as error:
        raise KernelError.of(error, "open", f"'{error.filename}'") from None


def leave_session_keyring() -> None:
    """Join a new session keyring, nameless and empty: keyctl(2), KEYCTL_JOIN_SESSION_KEYRING."""
    # Otherwise an exec could list the server's keys, also those that only their possessor may see.
    syscall("keyctl", "KEYCTL_JOIN_SESSION_KEYRING", KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
