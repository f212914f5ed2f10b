"""The shim's door to the runtime library: start a holder, a container, an exec session; a container's cgroup.

The library's calls are synchronous; the caller becomes the parent of what they start.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from pyrunc.shim.session import Container

    class Group(Protocol):
        """A container's cgroup, as far as the shim is concerned (pyrunc.cgroups)."""

        def kill(self) -> None: ...
        def processes(self) -> list[int]: ...
        def oom_kills(self) -> int | None: ...

    class Starter(Protocol):
        """What the shim needs somebody to start for it."""

        def holder(self, wanted: dict[str, Any], sandbox_dir: str) -> Holder: ...

        def container(
            self,
            container_id: str,
            directory: str,
            launch: dict[str, Any],
            stdio: tuple[int, int, int],
            holder: Holder | None,
        ) -> Process: ...

        def execute(
            self, container: Container, process: dict[str, Any], stdio: Sequence[int], tty: bool
        ) -> Process: ...


class Process:
    """A process that was started, our child. `console_fd`, a pty's master, belongs to whoever gets this."""

    __slots__ = ("console_fd", "group", "pid", "start_time")

    def __init__(self, pid: int, start_time: int, group: Group, console_fd: int | None = None) -> None:
        self.pid, self.start_time, self.group, self.console_fd = pid, start_time, group, console_fd


class Holder:
    """The pod's holder and what the shim pins for the pod: the network namespace and detached mounts, by name."""

    __slots__ = ("mounts", "netns_fd", "pid", "start_time")

    def __init__(self, pid: int, start_time: int, netns_fd: int | None, mounts: dict[str, int]) -> None:
        self.pid, self.start_time, self.netns_fd, self.mounts = pid, start_time, netns_fd, mounts

    def fields(self) -> dict[str, Any]:
        """As the answer to `start_holder`."""
        path = None if self.netns_fd is None else f"/proc/{os.getpid()}/fd/{self.netns_fd}"
        return {"pid": self.pid, "start_time": self.start_time, "netns_path": path}

    def ended(self) -> None:
        """The holder has exited: the mounts go, the network namespace stays for the teardown of the network."""
        for fd in self.mounts.values():
            os.close(fd)
        self.mounts = {}
