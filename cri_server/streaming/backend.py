"""Defines the interface between the streaming server and the containers: sessions, and sockets into
pods.

A session is a running command (exec) or a container's stdio (attach), as file descriptors. The
session owns the descriptors. The streaming server reads and writes them without blocking, calls
`close_stdin` when the client has ended its input, and calls `close` exactly once.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ExecSessionOptions:
    """A checked `ExecRequest`: it has at least one stream, and no stderr with a tty. `changes`:
    `user`, `cwd` and `env` that override those of the container's OCI `process` object."""

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
    """A checked `PortForwardRequest`. `ports`: only WebSocket clients use them; SPDY clients name a
    port in each stream."""

    sandbox_id: str
    ports: tuple[int, ...] = ()


class StreamingSession(ABC):
    """A running exec or attach. It owns up to three descriptors, and closes each once.

    The descriptors are pipes, sockets or the master of a pty, and `None` for streams that the
    client did not request. With a tty `stdout_fd` is the master and `stdin_fd` a duplicate of it.
    They stay open until `close_stdin` and `close`. The streaming server makes them non-blocking.
    """

    def __init__(self, stdin: int | None, stdout: int | None, stderr: int | None) -> None:
        self.stdin_fd, self.stdout_fd, self.stderr_fd = stdin, stdout, stderr

    def close_stdin(self) -> None:
        """Close the stdin descriptor if it is open. The server calls this when the client has ended
        its input."""
        # The number is forgotten first: a second close could hit a new file with the same number.
        fd, self.stdin_fd = self.stdin_fd, None
        if fd is not None:
            os.close(fd)

    def close_descriptors(self) -> None:
        """Close all descriptors that are open."""
        self.close_stdin()
        fds, self.stdout_fd, self.stderr_fd = (self.stdout_fd, self.stderr_fd), None, None
        for fd in fds:
            if fd is not None:
                os.close(fd)

    @abstractmethod
    async def resize(self, width: int, height: int) -> None:
        """Set the terminal's size in characters."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the end of the command (exec) or container (attach). Return its exit code, which
        is 128 + n after signal n."""

    @abstractmethod
    async def close(self) -> None:
        """Close all descriptors and end the session. A running exec is killed with its descendants;
        an attached container continues."""


class Backend(Protocol):
    """Starts sessions. Its methods raise `pyrunc.errors.Error`; the client gets the error's
    message."""

    async def exec(self, options: ExecSessionOptions) -> StreamingSession: ...
    async def attach(self, options: AttachOptions) -> StreamingSession: ...
    async def dial(self, sandbox_id: str, port: int) -> socket.socket:
        """Connect to TCP `port` on the pod's loopback; the caller closes the socket."""
        ...
