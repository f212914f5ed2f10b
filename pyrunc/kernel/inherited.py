"""What fork(2) and execve(2) hand down and nothing else sets: each function gives the calling
process the kernel's own default.

All raise KernelError. EINVAL: this kernel does not have it, so there is nothing to hand down.
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
    """SCHED_OTHER with nice value 0, without SCHED_RESET_ON_FORK; no I/O priority of its own:
    sched(7), ioprio_set(2)."""
    with kernel_errors("sched_setscheduler", "SCHED_OTHER, nice 0"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    syscall("ioprio_set", "none", IOPRIO_WHO_PROCESS, 0, 0)


def reset_timer_slack() -> None:
    """PR_SET_TIMERSLACK. Its argument 0 stands for what the process was born with, which is
    inherited, too."""
    syscall("prctl", "PR_SET_TIMERSLACK", PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


def reset_personality() -> None:
    """personality(2): PER_LINUX, addresses randomised."""
    syscall("personality", "PER_LINUX", 0)


def reset_huge_pages() -> None:
    """PR_SET_THP_DISABLE."""
    syscall("prctl", "PR_SET_THP_DISABLE", PR_SET_THP_DISABLE, 0, 0, 0, 0)


def reset_memory_merge() -> None:
    """PR_SET_MEMORY_MERGE (Linux 6.4): same-page merging of all memory."""
    syscall("prctl", "PR_SET_MEMORY_MERGE", PR_SET_MEMORY_MERGE, 0, 0, 0, 0)


def reset_memory_errors() -> None:
    """PR_MCE_KILL: when corrupted memory kills is the machine's setting."""
    syscall("prctl", "PR_MCE_KILL", PR_MCE_KILL, PR_MCE_KILL_CLEAR, 0, 0, 0)


def reset_io_flusher() -> None:
    """PR_SET_IO_FLUSHER: of those who may set it (CAP_SYS_RESOURCE)."""
    syscall("prctl", "PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, 0, 0, 0, 0)


def reset_secure_bits() -> None:
    """PR_SET_SECUREBITS: root has capabilities, and a change of user loses them (capabilities(7))."""
    syscall("prctl", "PR_SET_SECUREBITS", PR_SET_SECUREBITS, 0, 0, 0, 0)


def reset_memory_policy() -> None:
    """set_mempolicy(2): MPOL_DEFAULT."""
    syscall("set_mempolicy", "MPOL_DEFAULT", MPOL_DEFAULT, 0, 0)


def reset_core_dumps() -> None:
    """What a core dump holds, /proc/PID/coredump_filter of core(5): as the machine's first process
    has it."""
    try:
        with open(COREDUMP_FILTER.format(1), "rb", buffering=0) as file:
            machines = file.read(16) or b""
        write_once(COREDUMP_FILTER.format("self"), b"0x" + machines.strip())
    except OSError as error:
        raise KernelError.of(error, "open", f"'{error.filename}'") from None


def leave_session_keyring() -> None:
    """A session keyring of its own, nameless and empty: keyctl(2), KEYCTL_JOIN_SESSION_KEYRING."""
    syscall("keyctl", "KEYCTL_JOIN_SESSION_KEYRING", KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
