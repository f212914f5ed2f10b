"""Keeps the stdin of containers open while their shim is replaced: the server holds copies of the
pipes' writing ends. The keeper cannot hold them, because as long as it has a writing end, the
container never reads the end of file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable

from cri_server.store.facts import ProcessIdentity
from cri_server.store.model import Container
from pyrunc.errors import Error
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import open_from_process, open_pidfd


class StdinPipes:
    """Holds the writing ends of containers' stdin, by container id, from the end of one shim until
    the next shim has taken over. If the server is killed meanwhile, the containers read the end of
    their input."""

    def __init__(self) -> None:
        self._pipes: dict[str, int] = {}

    def take(self, shim: ProcessIdentity, containers: Iterable[Container]) -> None:
        """Copy the writing ends of these containers' stdin pipes from the shim. Skips containers
        whose stdin is not a pipe."""
        for container in containers:
            self.close(container.id)
            if container.config.stdin and not container.config.tty and container.process:
                pipe = _open_writing_end(shim, container.process.pid)
                if pipe is not None:
                    self._pipes[container.id] = pipe

    def pop(self, container: Container) -> list[int]:
        """Remove the held writing end of the container's stdin, and return it in a list; the caller
        closes it. The list is empty if none is held."""
        pipe = self._pipes.pop(container.id, None)
        return [] if pipe is None else [pipe]

    def close(self, *container_ids: str) -> None:
        """Close the writing ends of the stdin of these containers. Without arguments close those of
        all containers."""
        for identifier in container_ids or list(self._pipes):
            pipe = self._pipes.pop(identifier, None)
            if pipe is not None:
                os.close(pipe)


def _open_writing_end(shim: ProcessIdentity, reader: int) -> int | None:
    """Return a copy of the shim's writing end of the pipe that a process has as stdin. `reader`:
    the process's pid. Return None if its stdin is no pipe, or if it or the shim has ended."""
    try:
        pipe = os.readlink(f"/proc/{reader}/fd/0")
        if not pipe.startswith("pipe:"):
            return None
        pidfd = open_pidfd(shim.pid, shim.start_time)
        if pidfd is None:
            return None
        with closing_fd(pidfd):
            return _copy_writing_end(shim.pid, pidfd, pipe)
    except (Error, OSError):  # one of the two has ended, or the server may not ptrace the shim
        return None


def _copy_writing_end(pid: int, pidfd: int, pipe: str) -> int | None:
    for number in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{number}") == pipe:
            copy = open_from_process(pidfd, int(number))
            if fcntl.fcntl(copy, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                return copy
            os.close(copy)
    return None
