"""What the streaming server needs from the rest of the server: sessions in containers and sockets
into pods.

A session is a running command (exec) or a seat at a container's stdio (attach), seen as file
descriptors. The descriptors belong to the session: the streaming server reads and writes them
without blocking, asks for stdin to be closed when the client has ended it, and closes the session
exactly once, whatever happened.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """A checked `ExecRequest`: never a tty with stderr, at least one stream. `changes`: of the
    container's OCI process."""

    container_id: str
    command: tuple[str, ...]
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False
    changes: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """A checked `AttachRequest`."""

    container_id: str
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False


@dataclass(frozen=True, slots=True)
class PortForwardOptions:
    """A checked `PortForwardRequest`; `ports` are used by WebSocket clients only, SPDY names a port
    per stream."""

    sandbox_id: str
    ports: tuple[int, ...] = ()


class Session(Protocol):
    """A running exec or attach.

    The descriptors are pipes, sockets or a pty's master; `None` where the client did not ask for
    the stream. With a tty `stdout_fd` is the master and `stdin_fd` a duplicate. They stay valid
    until `close_stdin` and `close`, and are made non-blocking.
    """

    @property
    def stdin_fd(self) -> int | None: ...
    @property
    def stdout_fd(self) -> int | None: ...
    @property
    def stderr_fd(self) -> int | None: ...

    def close_stdin(self) -> None:
        """The client has ended its input; `stdin_fd` is not used any more."""

    async def resize(self, width: int, height: int) -> None:
        """Set the terminal's size in characters."""

    async def wait(self) -> int:
        """The exit code of the command (exec) or the container (attach), once it has ended; 128 + n
        for signal n."""
        ...

    async def close(self) -> None:
        """Give back everything. An exec that still runs is killed with its descendants; an attached
        container goes on."""


class Backend(Protocol):
    """Starts sessions. What goes wrong is raised as `pyrunc.errors.Error` and told to the client."""

    async def exec(self, options: ExecOptions) -> Session: ...
    async def attach(self, options: AttachOptions) -> Session: ...
    async def dial(self, sandbox_id: str, port: int) -> socket.socket:
        """A connected TCP socket to `port` on the pod's loopback; the caller closes it."""
        ...


class Descriptors:
    """The descriptor side of a session, to be inherited: owns up to three descriptors and closes
    each once."""

    def __init__(self, stdin: int | None, stdout: int | None, stderr: int | None) -> None:
        self.stdin_fd, self.stdout_fd, self.stderr_fd = stdin, stdout, stderr

    def close_stdin(self) -> None:
        """Close stdin now; nothing if it is closed."""
        fd, self.stdin_fd = self.stdin_fd, None
        if fd is not None:
            os.close(fd)

    def close_descriptors(self) -> None:
        """Close what is still open."""
        self.close_stdin()
        fds, self.stdout_fd, self.stderr_fd = (self.stdout_fd, self.stderr_fd), None, None
        for fd in fds:
            if fd is not None:
                os.close(fd)
