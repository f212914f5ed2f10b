"""What a process is to its descendants and its parent: who inherits orphans, who dies with whom (prctl(2))."""

from __future__ import annotations

import os

from pyrunc.abi.prctl import PR_SET_CHILD_SUBREAPER
from pyrunc.errors import KernelError
from pyrunc.kernel.call import syscall


def set_child_subreaper(on: bool = True) -> None:
    """Orphaned descendants of the caller become its children (PR_SET_CHILD_SUBREAPER); not inherited, kept by execve."""
    syscall("prctl", "PR_SET_CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def set_parent_death_signal(signal: int, parent: int) -> None:
    """The caller gets `signal` when the *thread* that forked it ends (PR_SET_PDEATHSIG): only for single-threaded parents.

    `parent` is the pid that forked it: when that has ended already, the signal comes now (the kernel would wait for the end of
    whoever adopted the caller).
    """
    import prctl  # 1 ms, which commands that do not need it do not pay

    try:
        prctl.set_pdeathsig(signal)
    except OSError as error:
        raise KernelError("prctl", "PR_SET_PDEATHSIG", error.errno or 0) from None
    if os.getppid() != parent:
        os.kill(os.getpid(), signal)


def set_name(name: str) -> None:
    """The caller's name in /proc/PID/comm, at most 15 bytes (PR_SET_NAME)."""
    import prctl

    prctl.set_name(name)
