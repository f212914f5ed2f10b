"""A streaming backend that runs processes of this machine, outside any container, with real pipes,
ptys and sockets.

Like a container's process, each has its own session, its terminal as controlling terminal, and all
signals at their defaults.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import socket
import struct
import termios
from dataclasses import dataclass, field

from cri_server.streaming.backend import AttachOptions, ExecSessionOptions, StreamingSession
from pyrunc.errors import KernelError, NotFound

CATCHABLE = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}


class ProcessSession(StreamingSession):
    """A running command and our ends of its standard streams. `close` kills its process group."""

    def __init__(self, pid: int, stdin: int | None, stdout: int | None, stderr: int | None):
        super().__init__(stdin, stdout, stderr)
        self._pid, self._code = pid, -1
        self.closed = asyncio.Event()

    async def resize(self, width: int, height: int) -> None:
        assert self.stdout_fd is not None
        fcntl.ioctl(self.stdout_fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        pidfd = os.pidfd_open(self._pid)
        loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._reap()

    async def close(self) -> None:
        assert not self.closed.is_set()
        self.close_descriptors()
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._reap()
        self.closed.set()

    def _reap(self) -> int:
        """Return the exit code of the ended process, 128 + n for signal n; may be called again."""
        if self._code < 0:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._code = code if code >= 0 else 128 - code
        return self._code


class AttachSession(StreamingSession):
    """A session attached to the process of another session. Closing it does not end the process."""

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
    """Runs exec commands as processes of this machine, attaches to the processes in `containers`,
    and connects to ports of this network namespace."""

    sessions: list[ProcessSession] = field(default_factory=list)
    containers: dict[str, ProcessSession] = field(default_factory=dict)

    async def exec(self, options: ExecSessionOptions) -> ProcessSession:
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


def start(options: ExecSessionOptions) -> ProcessSession:
    """Start a command with the standard streams that `options` requests."""
    if options.tty:
        return _start_on_pty(options)
    ours: list[int | None] = []
    theirs: list[int] = []
    for place, attached in enumerate((options.stdin, options.stdout, options.stderr)):
        reading, writing = os.pipe() if attached else (os.open(os.devnull, os.O_RDWR), -1)
        near, far = (writing, reading) if place == 0 or not attached else (reading, writing)
        ours.append(near if attached else None)
        theirs.append(far)
    pid = _spawn(
        options.command, [(os.POSIX_SPAWN_DUP2, fd, place) for place, fd in enumerate(theirs)]
    )
    for fd in theirs:
        os.close(fd)
    return ProcessSession(pid, *ours)


def _start_on_pty(options: ExecSessionOptions) -> ProcessSession:
    """Start a command on a pty, which becomes its controlling terminal."""
    master, slave = pty.openpty()
    # the first terminal that the leader of a session opens
    terminal = (os.POSIX_SPAWN_OPEN, 0, os.ttyname(slave), os.O_RDWR, 0)
    pid = _spawn(
        options.command, [terminal, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    )
    os.close(slave)
    return ProcessSession(pid, os.dup(master) if options.stdin else None, master, None)


def _spawn(command: tuple[str, ...], files: list[tuple[int, ...]]) -> int:
    return os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=files,
        setsid=True,
        setsigmask=[],
        # A shell that starts the tests in the background ignores SIGINT, which a child inherits.
        setsigdef=CATCHABLE,
    )
