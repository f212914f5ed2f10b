"""A streaming backend over processes of this machine: real pipes, ptys and sockets, no container around them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
from dataclasses import dataclass, field

from cri_server.streaming.backend import AttachOptions, Descriptors, ExecOptions
from pyrunc.errors import KernelError, NotFound


class ProcessSession(Descriptors):
    """A command with the ends of its stdio, in a process group of its own that `close` kills."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdin: int | None, stdout: int | None, stderr: int | None
    ):
        super().__init__(stdin, stdout, stderr)
        self._process = process
        self.closed = asyncio.Event()

    async def resize(self, width: int, height: int) -> None:
        assert self.stdout_fd is not None
        fcntl.ioctl(self.stdout_fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    async def close(self) -> None:
        assert not self.closed.is_set()
        self.close_descriptors()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self.closed.set()


class AttachSession(Descriptors):
    """A seat at a process of somebody else: closing it does not end the process."""

    def __init__(self, session: ProcessSession):
        super().__init__(
            *(
                None if fd is None else os.dup(fd)
                for fd in (session.stdin_fd, session.stdout_fd, session.stderr_fd)
            )
        )
        self._session = session

    async def resize(self, width: int, height: int) -> None:
        await self._session.resize(width, height)

    async def wait(self) -> int:
        return await self._session.wait()

    async def close(self) -> None:
        self.close_descriptors()


@dataclass
class ProcessBackend:
    """Runs exec commands here; attaches to `containers`; dials this network namespace."""

    sessions: list[ProcessSession] = field(default_factory=list)
    containers: dict[str, ProcessSession] = field(default_factory=dict)

    async def exec(self, options: ExecOptions) -> ProcessSession:
        session = start(options)
        self.sessions.append(session)
        return session

    async def attach(self, options: AttachOptions) -> AttachSession:
        if options.container_id not in self.containers:
            raise NotFound(f"container {options.container_id}")
        return AttachSession(self.containers[options.container_id])

    async def dial(self, sandbox_id: str, port: int) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except OSError as error:
            sock.close()
            raise KernelError("connect", f"127.0.0.1:{port}", error.errno or 0) from None
        return sock


def start(options: ExecOptions) -> ProcessSession:
    """Start a command with the stdio that the options ask for."""
    if options.tty:
        return _start_on_pty(options)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        options.command,
        stdin=pipe if options.stdin else subprocess.DEVNULL,
        stdout=pipe if options.stdout else subprocess.DEVNULL,
        stderr=pipe if options.stderr else subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    files = (process.stdin, process.stdout, process.stderr)
    fds = [None if file is None else os.dup(file.fileno()) for file in files]
    for file in files:
        if file is not None:
            file.close()
    return ProcessSession(process, *fds)


def _start_on_pty(options: ExecOptions) -> ProcessSession:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        options.command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    return ProcessSession(process, os.dup(master) if options.stdin else None, master, None)
