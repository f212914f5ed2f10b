"""A shim's life: become the pod's reaper, say who we are, serve. Forked from the zygote as `pyrunc.shim.main:main`.

Most shims were the zygote's spare before: what needs no pod has been done then (`prepare`), while nobody was waiting.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from errno import EINVAL, ENOSYS, EPERM

from pyrunc.compile import null
from pyrunc.errors import KernelError
from pyrunc.kernel import inherited, reaper
from pyrunc.program import launch
from pyrunc.shim import messages, pod
from pyrunc.shim.network import open_network
from pyrunc.shim.rehearse import rehearse as rehearse  # found and called by the zygote
from pyrunc.shim.starter import LibraryStarter
from pyrunc.shim.worker import Parked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.shim.starter import Starter

OOM_SCORE_ADJ = -999
RESETS = (
    inherited.reset_scheduling,
    inherited.reset_timer_slack,
    inherited.reset_personality,
    inherited.reset_huge_pages,
    inherited.reset_memory_merge,
    inherited.reset_memory_errors,
    inherited.reset_io_flusher,
    inherited.reset_secure_bits,
    inherited.reset_memory_policy,
    inherited.reset_core_dumps,
    inherited.leave_session_keyring,
)

_parked: Parked | None = None
_starter: LibraryStarter | None = None
_network: int | None = None


def prepare(fds: list[int]) -> dict[str, Any]:
    """Called in the zygote's spare, before there is a pod: a worker is parked for the holder's start, and the pod's network
    namespace is made: `{"network": descriptor}`. Where that is refused the pod's own shim will say why.
    """
    global _starter, _parked, _network
    _starter = _begin()
    _parked = Parked(_starter.perform, fds)
    try:
        _network = open_network()
    except KernelError as error:
        print(f"pyrunc-shim: no network namespace ahead: {error}", file=sys.stderr)
        return {}
    return {"network": _network}


def main(arguments: dict[str, Any], fds: list[int]) -> None:
    """`arguments`: sandbox_dir, containers_dir, optionally starter (`module:class`); `fds`: the listening socket."""
    sandbox_dir = arguments["sandbox_dir"]
    reaper.set_name("pyrunc-shim")
    _open_own_log(sandbox_dir)
    starter: Starter = _starter or _begin()
    if "starter" in arguments:
        starter = _named(arguments["starter"])
    pod.write_own_record(sandbox_dir)
    pod.Pod(sandbox_dir, arguments["containers_dir"], starter, fds[0], _parked, _network).serve()


def _begin() -> LibraryStarter:
    """What needs no pod."""
    _be_steady()
    reaper.set_child_subreaper()
    launch.executable()  # workers inherit it
    null.prepare()  # and this
    return LibraryStarter(_lower_oom_score())


def _be_steady() -> None:
    """Nothing of the server's surroundings reaches the pod; what is sent to a whole session or group is not meant for us.

    Limits, CPUs, signals, capabilities and oom_score_adj are each program's to set. What the kernel does not let go of (a
    server under no_new_privs, a filter, locked secure bits) stays.
    """
    os.chdir("/")
    os.umask(0o022)
    for reset in RESETS:
        try:
            reset()
        except KernelError as error:
            if error.errno not in (EINVAL, ENOSYS, EPERM):
                raise
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _open_own_log(sandbox_dir: str) -> None:
    """Stderr is a file in the sandbox's folder: the server's own may be gone tomorrow.

    The lock is the open file's, which our forks have as well: whoever gets it alone knows that all of us have ended.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(f"{sandbox_dir}/{messages.LOG}", flags, 0o600)
    fcntl.flock(log, fcntl.LOCK_SH)
    os.dup2(log, 2)
    os.close(log)


def _lower_oom_score() -> int:
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
