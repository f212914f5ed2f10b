"""A launch into a container that runs: its first process may end meanwhile, or may have moved to a
group of its own."""

from __future__ import annotations

import os
from errno import EBUSY, ENOENT

from pyrunc.errors import KernelError, NotFound, WrongState
from pyrunc.launch.run import launch_steps
from pyrunc.program.errors import OperationFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

    from pyrunc.launch.model import Launch
    from pyrunc.launch.run import ChildProcess, Times
    from pyrunc.undo import Undo


def entering(
    launch: Launch, undo: Undo, times: Times | None = None
) -> Generator[int, None, tuple[ChildProcess, bool]]:
    """`launch_steps`, and whether the process was born in another group than the launch's own. The
    descriptor `container` is the pidfd of the container's first process. Raises WrongState when
    that has ended."""
    try:
        try:
            return (yield from launch_steps(launch, undo, times=times)), False
        except OperationFailed as error:
            # The container's init may have moved to a group below: then this one takes no processes
            # (cgroup v2, no internal processes), or it is gone.
            if launch.cgroup is None or error.errno not in (EBUSY, ENOENT) or error.call != "clone":
                raise
        group = os.open(
            _current_group(launch.container_pid), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            moved = launch.replace(descriptors={**launch.descriptors, "cgroup": group})
            return (yield from launch_steps(moved, undo, times=times)), True
        finally:
            os.close(group)
    except KernelError as error:
        if error.call == "setns" and not _alive(launch.descriptors["container"]):
            raise WrongState("the container is not running") from None
        raise


def _alive(pidfd: int) -> bool:
    import select

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return not poller.poll(0)


def _current_group(pid: int) -> str:
    """The directory of the v2 group that the process is in now."""
    from pyrunc.kernel import cgroup as tree

    try:
        with open(f"/proc/{pid}/cgroup", "rb", buffering=0) as file:
            lines = (file.readall() or b"").decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        raise WrongState("the container is not running") from None
    for line in lines:
        if line.startswith("0::"):
            return tree.root() + line[3:]
    raise NotFound(f"process {pid} is in no cgroup of the v2 tree")
