"""Starts createContainer hooks, which run in the namespaces of a container before its
pivot_root(2).

At that point `/` is still the runtime's root. So the hook's path is looked up on the host, and the
hook sees the container's mounts as well. For each hook the launcher runs a small program: it joins
the namespaces of the container's process, which waits meanwhile, and executes the hook.
"""

from __future__ import annotations

import os

from pyrunc import jsontext
from pyrunc.abi.clone import NAMESPACES
from pyrunc.errors import KernelError
from pyrunc.kernel.process import status_fields
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.launch import launch
from pyrunc.program.model import PID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.launch.run import ChildProcess
    from pyrunc.spec.model import Hook


def spawner(
    process: ChildProcess, namespaces: Sequence[str], folder: str
) -> Callable[[Hook, list[int]], int]:
    """Return a function that starts a hook in these `namespaces` of `process`, the container
    process that is being created. `folder`: the hook's working directory.

    The function takes the hook and its three stdio descriptors, and returns the hook's pid. The
    hook is our child.
    """
    flags = sum(NAMESPACES[kind] for kind in namespaces)

    def spawn(hook: Hook, files: list[int]) -> int:
        a, pidfd = Assembler(), 3
        result = a.slot(4)
        macros.prologue(a, "pyrunc:hook")
        # The launcher needs no file from here on, so it does not matter what the container's mounts
        # cover.
        a.sys("setns", pidfd, flags)
        # The clone enters the pid namespace: setns(2) changes that for children only.
        macros.fork_parent(a, 0)
        a.sys("chdir", folder)
        macros.close_all_from(a, 3, [pidfd + 1])  # the socket's number is the first above ours
        argv, envp = a.pointers(hook.args or (hook.path,)), a.pointers(hook.env or ())
        macros.execute(a, [hook.path], argv, envp, result=result)
        a.fail(result)
        running = launch(a.program(), stdio=files, fds={pidfd: process.pidfd})
        try:
            pid = running.expect(PID).value
            try:
                while running.receive() is not None:
                    pass
            except KernelError as error:
                os.waitpid(pid, 0)
                raise KernelError("execve", repr(hook.path), error.errno) from None
            return pid
        finally:
            running.close()

    return spawn


def inner_pid(pid: int) -> int:
    """Return the process's pid in its own pid namespace (NSpid of /proc/PID/status)."""
    # The last of NSpid is the number in the innermost namespace (proc_pid_status(5)).
    return int(status_fields(pid).get(b"NSpid", b"%d" % pid).split()[-1])


def write_state(descriptor: int, state: dict[str, Any]) -> None:
    """Write the container's state into the memfd that startContainer hooks get as stdin."""
    os.pwrite(descriptor, jsontext.dumps(state).encode("ascii"), 0)
