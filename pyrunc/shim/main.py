"""The main module of a shim. A shim is a fork of the zygote that runs `pyrunc.shim.main:main`.

`inherit` runs once in the zygote; all shims inherit the descriptor that it opens.
"""

from __future__ import annotations

import os
import sys

# not from `signal`, which imports enum
from _signal import SIG_IGN, SIGHUP, SIGINT, signal  # type: ignore[import-not-found]

from pyrunc.kernel import bpf, inherited, reaper
from pyrunc.kernel.fd import write_once
from pyrunc.launch import stdio
from pyrunc.program import launch
from pyrunc.shim import other_runtime  # noqa: F401  (`Starter.after_stop` imports it)
from pyrunc.shim.messages import LOG, Arguments
from pyrunc.shim.pods import ShimPods
from pyrunc.shim.starter import Starter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.ipc import Message

# The value of kubelet (KubeletOOMScoreAdj) and of containerd's unit. -1000 would exempt the process
# altogether (proc_pid_oom_score_adj(5)), even if it leaks.
OOM_SCORE_ADJ = -999


def inherit(lowest: int) -> list[int]:
    """Open the sealed launcher in the zygote, before it forks. Returns the launcher's descriptor,
    which all shims inherit and whose number is at least `lowest`."""
    return [launch.executable(lowest)]


def main(arguments: Message, fds: list[int]) -> None:
    """Run a shim until it has neither a pod nor a server, or until a client ends it (`EndShim`).

    - `arguments`: the fields of `Arguments`
    - `fds`: the listening socket, and a socket that is connected to the server
    """
    parsed = Arguments.of(arguments)
    reaper.set_name("pyrunc-shim")
    _reset_inherited_state()
    _lower_oom_score()
    _log_to(f"{parsed.folder}/{LOG}")
    reaper.set_child_subreaper()  # not inherited: PR_SET_CHILD_SUBREAPER(2const)
    stdio.prepare_nulls()  # forks inherit it
    bpf.cache_programs()
    starter: Starter = _named(parsed.starter) if parsed.starter else Starter(parsed.oom_score_adj)
    listener, client = fds
    ShimPods(parsed, listener, client, starter).run()


def _log_to(path: str) -> None:
    """Redirect this process's stderr to a file, because the shim may live longer than the
    server."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 2)
    os.close(log)


def _reset_inherited_state() -> None:
    """Reset the process state that pods would inherit from the server. Also ignore SIGHUP and
    SIGINT, which a terminal sends to the server's whole session or process group.

    Each launch sets limits, CPUs, signals, capabilities and oom_score_adj itself. Some state cannot
    be reset and stays: no_new_privs, a seccomp filter, locked secure bits.
    """
    # The modes of logs (0640) and their folders (0755) must not depend on the server's umask.
    os.umask(0o022)
    inherited.reset_inherited()
    for number in (SIGHUP, SIGINT):
        signal(number, SIG_IGN)


def _lower_oom_score() -> None:
    """Protect the shim from the OOM killer, where that is permitted: killing it frees little memory
    and interrupts pods. Containers get another score."""
    try:
        write_once("/proc/self/oom_score_adj", b"%d" % OOM_SCORE_ADJ)
    # A lower value needs CAP_SYS_RESOURCE, which a server in a user namespace does not have.
    except PermissionError:
        pass


def _named(name: str) -> Any:
    module, _, starter = name.partition(":")
    __import__(module)
    return getattr(sys.modules[module], starter)()
