"""A shim's life: become the pod's reaper, say who we are, serve. Forked from the zygote as `pyrunc.shim.main:main`."""

from __future__ import annotations

import os
import signal
import sys

from pyrunc.kernel import reaper
from pyrunc.shim import messages, pod
from pyrunc.shim.rehearse import rehearse as rehearse  # found and called by the zygote
from pyrunc.shim.starter import LibraryStarter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OOM_SCORE_ADJ = -999


def main(arguments: dict[str, Any], fds: list[int]) -> None:
    """`arguments`: sandbox_dir, containers_dir, optionally starter (`module:class`); `fds`: the listening socket."""
    sandbox_dir = arguments["sandbox_dir"]
    _open_own_log(sandbox_dir)
    _be_steady()
    reaper.set_name("pyrunc-shim")
    reaper.set_child_subreaper()
    inherited = _be_spared()
    pod.write_own_record(sandbox_dir)
    starter = _named(arguments["starter"]) if "starter" in arguments else LibraryStarter(inherited)
    pod.Pod(sandbox_dir, arguments["containers_dir"], starter, fds[0]).serve()


def _be_steady() -> None:
    """Nothing of the server's surroundings matters; what is sent to a whole session or group is not meant for us."""
    os.chdir("/")
    os.umask(0o022)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _open_own_log(sandbox_dir: str) -> None:
    """Stderr is a file in the sandbox's folder: the server's own may be gone tomorrow."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(f"{sandbox_dir}/{messages.LOG}", flags, 0o600)
    os.dup2(log, 2)
    os.close(log)


def _be_spared() -> int:
    """Killing a shim frees little and loses a pod: the OOM killer should look elsewhere, where we may say so.

    Returns what was in force before, which is what containers are to inherit.
    """
    descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    try:
        before = int(os.read(descriptor, 16))
        try:
            os.pwrite(descriptor, b"%d" % OOM_SCORE_ADJ, 0)
        except PermissionError:
            pass
    finally:
        os.close(descriptor)
    return before


def _named(name: str) -> Any:
    module, _, starter = name.partition(":")
    __import__(module)
    return getattr(sys.modules[module], starter)()
