"""Launches a process into a running container. During the launch, the container's first process may
end (`WrongState`) or move to another cgroup (the new process can follow it)."""

from __future__ import annotations

from errno import EBUSY, ENOENT

from pyrunc.errors import KernelError, WrongState
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import wait_end
from pyrunc.launch.run import launch_steps
from pyrunc.program.errors import OperationFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

    from pyrunc.launch.model import Launch
    from pyrunc.launch.run import ChildProcess, Times
    from pyrunc.undo import Undo


def enter_steps(
    launch: Launch, undo: Undo, times: Times | None = None
) -> Generator[int, None, tuple[ChildProcess, bool]]:
    """Start a process in a running container. A generator: resume it when the yielded descriptor is
    readable. `launch.descriptors["container"]` must be the pidfd of the container's first process.

    Returns the new process, and whether it is in another cgroup than that of `launch.descriptors`.
    The kernel may refuse that cgroup after the first process has moved. If `launch.cgroup` is set,
    the new process is then put into the first process's present cgroup.

    Raises WrongState when the first process has ended, and the errors of `launch_steps`.
    """
    try:
        try:
            return (yield from launch_steps(launch, undo, times=times)), False
        except OperationFailed as error:
            # The container's init may have moved to a group below: then this group takes no
            # processes (cgroups(7), "no internal processes" rule), or it is gone.
            # systemd as a container's init does so at its start; runc, too, follows init's group.
            if launch.cgroup is None or error.errno not in (EBUSY, ENOENT) or error.call != "clone":
                raise
        from pyrunc.kernel.cgroup import open_present_group

        with closing_fd(open_present_group(launch.container_pid)) as group:
            moved = launch.replace(descriptors={**launch.descriptors, "cgroup": group})
            return (yield from launch_steps(moved, undo, times=times)), True
    except KernelError as error:
        # setns(2) with a pidfd answers ESRCH for a process that has ended, which a caller should
        # not have to know.
        if error.call == "setns" and wait_end(launch.descriptors["container"], 0):
            raise WrongState("the container is not running") from None
        raise
