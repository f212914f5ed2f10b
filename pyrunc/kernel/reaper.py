"""What a process is to its descendants and its parent: who inherits orphans, who dies with whom
(prctl(2))."""

from __future__ import annotations

import os

from pyrunc.abi.prctl import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, PR_SET_PDEATHSIG
from pyrunc.kernel.call import path_bytes, syscall


def set_child_subreaper(on: bool = True) -> None:
    """Orphaned descendants of the caller become its children (PR_SET_CHILD_SUBREAPER); not
    inherited, kept by execve."""
    syscall("prctl", "PR_SET_CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def set_parent_death_signal(signal: int, parent: int) -> None:
    """The caller gets `signal` when the *thread* that forked it ends (PR_SET_PDEATHSIG): only for
    single-threaded parents.

    `parent` is the pid that forked it: when that has ended already, the signal comes now (the
    kernel would wait for the end of whoever adopted the caller).
    """
    syscall("prctl", "PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, signal, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal)


def set_name(name: str) -> None:
    """The caller's name in /proc/PID/comm; the kernel keeps the first 15 bytes (PR_SET_NAME)."""
    syscall("prctl", "PR_SET_NAME", PR_SET_NAME, path_bytes(name) + b"\0", 0, 0, 0)
