"""A shim's life: become the pod's reaper, say who we are, serve. Forked from the zygote as `pyrunc.shim.main:main`.

What is the same for all shims the zygote does once, and they inherit it (`inherit`). Most shims were the zygote's spare before:
what needs no pod has been done then (`prepare`), while nobody was waiting.
"""

from __future__ import annotations

import os
import sys
from _signal import SIG_IGN, SIGHUP, SIGINT, signal  # type: ignore[import-not-found]  # (signal brings enum)
from errno import EINVAL, ENOSYS, EPERM

from pyrunc.errors import KernelError
from pyrunc.kernel import inherited, reaper
from pyrunc.launch import null
from pyrunc.program import launch
from pyrunc.shim.messages import Arguments, Prepared
from pyrunc.shim.network import open_network
from pyrunc.shim.pods import Pods, open_log
from pyrunc.shim.starter import LibraryStarter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.shim.starter import Starter

OOM_SCORE_ADJ = -999
GIVE_BACK_AFTER_S = 30.0  # at most so often, as what is given back is copied again by the next probe
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

_begun = False
_network: int | None = None


def inherit(lowest: int) -> list[int]:
    """Called once in the zygote: what forks hand down. Returns descriptors that all children keep, numbered from `lowest`."""
    _be_steady()
    _lower_oom_score()
    return [launch.executable(lowest)]


def prepare(fds: list[int]) -> Message:
    """Called in the zygote's spare, before there is a pod: its network namespace is made. The fields of `Prepared`. Where that is
    refused the pod's own shim will say why."""
    global _begun, _network
    _begin()
    _begun = True
    try:
        _network = open_network()
    except KernelError as error:
        print(f"pyrunc-shim: no network namespace ahead: {error}", file=sys.stderr)
    return Prepared(_network).to_fields()


def main(arguments: Message, fds: list[int]) -> None:
    """`arguments`: the fields of `Arguments`; `fds`: the listening socket."""
    asked = Arguments.of(arguments)
    reaper.set_name("pyrunc-shim")
    log = open_log(asked.sandbox_dir)
    os.dup2(log, 2)
    if not _begun:
        _begin()
    starter: Starter = _named(asked.starter) if asked.starter else LibraryStarter()
    pods = Pods(starter, asked.keeper)
    pods.add(asked.sandbox_dir, asked.containers_dir, fds[0], _network, log)
    try:
        from pyrunc.accelerate.template import give_back
    except ImportError:  # that folder may be removed
        pass
    else:
        pods.loop.after_work(GIVE_BACK_AFTER_S, give_back)
    pods.loop.run()


def _begin() -> None:
    """What needs no pod."""
    reaper.set_child_subreaper()  # not inherited: PR_SET_CHILD_SUBREAPER(2const)
    null.prepare()  # forks inherit it


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
    for number in (SIGHUP, SIGINT):
        signal(number, SIG_IGN)


def _lower_oom_score() -> None:
    """Killing a shim frees little and loses a pod: the OOM killer should look elsewhere, where we may say so. Containers get a
    score of their own."""
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"%d" % OOM_SCORE_ADJ)
    except PermissionError:
        pass
    finally:
        os.close(descriptor)


def _named(name: str) -> Any:
    module, _, starter = name.partition(":")
    __import__(module)
    return getattr(sys.modules[module], starter)()
