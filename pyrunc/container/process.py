"""The class for a process that was started in a container."""

from __future__ import annotations

from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.cgroups.group import Cgroup
    from pyrunc.container.notify import NotifyProxy
    from pyrunc.launch.run import ChildProcess


class ContainerProcess(Value):
    """A process that was started in a container. The caller closes the descriptors.

    - `console_fd`: the master of the process's terminal, None without one
    - `warnings`: the warnings of the process's plan
    - `cgroup`: the cgroup that was made for the process
    - `proxy`: the socket on which the running container reports READY to a service manager
    """

    pid: int
    pidfd: int
    start_time: int
    console_fd: int | None
    warnings: tuple[str, ...] = ()
    cgroup: Cgroup | None = None
    proxy: NotifyProxy | None = None

    @classmethod
    def of(
        cls, child: ChildProcess, warnings: tuple[str, ...], cgroup: Cgroup | None = None
    ) -> ContainerProcess:
        """Make a ContainerProcess from a launched child. `warnings`: the warnings of the child's
        plan."""
        return cls(child.pid, child.pidfd, child.start_time, child.console_fd, warnings, cgroup)
