"""The client of a shim: starts shims, connects to them again after a restart, calls them and
receives their events. For asyncio, without threads.

A shim whose socket closes is dead or drops the pod: every waiting call then raises Unavailable, and
`on_close` is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cri_server.zygote.client import Zygote
from cri_server.zygote.peer import Peer, answered, answered_without_fds, fail
from pyrunc import ipc
from pyrunc.errors import Error, NotFound, PeerError, ResourceExhausted, Unavailable
from pyrunc.kernel.fd import short_path
from pyrunc.records import Record, Request
from pyrunc.shim import messages
from pyrunc.shim.messages import (
    Event,
    ExecExited,
    Exit,
    event_of,
)

EventHandler = Callable[[Event], None]
Answered = TypeVar("Answered", bound=Record)
log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 2.0
SHIM = "pyrunc.shim.main:main"
"""The function that the zygote forks."""
MOST_FDS = ipc.MOST_FDS - 1
"""One is reserved for a long message, which is sent in a memfd."""


@dataclass
class Streams:
    """Descriptors of a session, the caller's to close. An exec with tty: `stdout_fd` is the pty's
    master, `stdin_fd` a copy."""

    stdin_fd: int | None = None
    stdout_fd: int | None = None
    stderr_fd: int | None = None

    def close(self) -> None:
        """Close the descriptors that are still open."""
        for name in ("stdin_fd", "stdout_fd", "stderr_fd"):
            fd = getattr(self, name)
            if fd is not None:
                os.close(fd)
                setattr(self, name, None)


@dataclass
class ExecSession(Streams):
    """A process started by `exec`. `exited` gets its exit code (Unavailable when the shim is
    lost)."""

    exec_id: str = ""
    container: str = ""
    pid: int = 0
    start_time: int = 0
    parts: Sequence[Sequence[Any]] = field(default=(), compare=False)
    exited: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ShimClient:
    """A connection to one shim. Use from one event loop; calls may overlap."""

    def __init__(
        self,
        sock: socket.socket,
        on_event: EventHandler | None,
        on_close: Callable[[], None] | None,
    ) -> None:
        self.on_event = on_event
        self.on_close = on_close
        self.timed = False
        """Whether `parts` tell the time of each operation of a launch, which makes it slower."""
        self._execs: dict[str, ExecSession] = {}
        self.lost_sessions: list[ExecSession] = []
        """Sessions that ran when the shim was lost."""
        self._peer = Peer(sock, "the shim", self._received, self._lost)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._peer.lost

    @classmethod
    async def connect(
        cls,
        directory: str | os.PathLike[str],
        *,
        on_event: EventHandler | None = None,
        on_close: Callable[[], None] | None = None,
        timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> ShimClient:
        """Connect to the shim of the sandbox folder `directory`. Raises NotFound (none lives
        there), DeadlineExceeded.

        `on_event(event)` gets every event object, `on_close()` is called once when the connection
        has ended by itself.
        """
        sock = _open_socket()
        try:
            with short_path(directory) as path:
                await _connect(sock, f"{path}/{messages.SOCKET}", timeout_s)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            raise NotFound(f"no shim in {os.fspath(directory)}") from None
        except BaseException:
            sock.close()
            raise
        return cls(sock, on_event, on_close)

    async def start_pause(self) -> messages.PauseStarted:
        """Start the pod's pause process, which pause.json describes. The path of the network
        namespace is valid as long as the shim lives."""
        return await self._ask(messages.StartPause(self.timed), messages.PauseStarted)

    async def create_container(
        self, request: messages.CreateContainer, fds: Sequence[int] = ()
    ) -> messages.ContainerCreated:
        """Compile the container, whose files are in its folder; its cgroup exists from here on.
        `fds`: of the request's images and opened sources; they stay the caller's. Raises Error,
        ResourceExhausted for more descriptors than fit a message."""
        if len(fds) > MOST_FDS:
            raise ResourceExhausted(
                f"the container's mounts need {len(fds)} images and sources, more than {MOST_FDS}"
            )
        request = request.replace(timed=self.timed)
        return await self._ask(request, messages.ContainerCreated, fds)

    async def drop_container(self, container: str) -> None:
        """Forget a container that was created and will not be started. Unknown containers are
        ignored."""
        await self._ask(messages.DropContainer(container), messages.Done)

    async def start_container(self, container: str) -> messages.ContainerStarted:
        """Start a container that was created; on failure its exit record is written and its cgroup
        removed."""
        return await self._ask(messages.StartContainer(container), messages.ContainerStarted)

    async def take_over_pause(self) -> str | None:
        """Go on with the pause process of a shim that was lost, which the keeper has; the path of
        the network namespace that this shim pins from now on. Raises NotFound, Unavailable (no
        keeper), as `take_over_container`."""
        return (await self._ask(messages.TakeOverPause(), messages.NetworkNamespace)).netns_path

    async def take_over_container(
        self,
        container: str,
        sessions: Sequence[ExecSession] = (),
        stdin: Sequence[int] = (),
        *,
        stdin_once: bool = False,
    ) -> None:
        """Go on with a container of a shim that was lost, which the keeper has; `sessions`, whose
        shim is gone, are ended. `stdin`: the writing end of its stdin, if there is one; it stays
        the caller's, and ends with its first client if `stdin_once`."""
        ended = [[session.pid, session.start_time] for session in sessions]
        request = messages.TakeOverContainer(container, ended, stdin_once)
        await self._ask(request, messages.Done, stdin)

    async def exec(
        self,
        container: str,
        exec_id: str,
        process: ipc.Message,
        *,
        stdin: bool = False,
        stdout: bool = True,
        stderr: bool = True,
        tty: bool = False,
    ) -> ExecSession:
        """Run an OCI process object in the container. The session is killed when this connection
        ends."""
        session = ExecSession(exec_id=exec_id, container=container)
        self._execs[exec_id] = session
        try:
            request = messages.StartExec(
                container, exec_id, process, stdin, stdout, stderr, tty, self.timed
            )
            answer, fds = await self.call(request, messages.ExecStarted)
        except BaseException as error:
            self._execs.pop(exec_id, None)
            if isinstance(error, asyncio.CancelledError):
                # The shim may have started it already, and its answer would find no session.
                self._peer.tell({"id": 0, **messages.KillExec(exec_id).to_message()})
            raise
        session.pid, session.start_time, session.parts = answer.pid, answer.start_time, answer.parts
        if tty:
            session.stdout_fd = fds[0]
            # A copy, because each stream of a session closes its own descriptor.
            session.stdin_fd = os.dup(fds[0]) if stdin else None
        else:
            _distribute(session, fds, stdin, stdout, stderr)
        return session

    async def kill_exec(self, exec_id: str) -> None:
        """Kill the session's process and all its descendants; also when the process itself has
        exited already."""
        await self._ask(messages.KillExec(exec_id), messages.Done)

    async def stop(self, container: str, signal: int, timeout_s: float) -> Exit:
        """Send `signal`, SIGKILL after `timeout_s` (at once if it is not above 0), return when the
        container has exited.

        The escalation goes on in the shim when this call is cancelled or the server dies. Of
        several stops the first one's signal is sent and the earliest deadline holds. Raises
        DeadlineExceeded if SIGKILL does not end it.
        """
        return await self._ask(messages.Stop(container, int(signal), timeout_s), Exit)

    async def attach(
        self, container: str, *, stdin: bool = False, stdout: bool = True, stderr: bool = False
    ) -> Streams:
        """Follow the container's new output and feed its stdin, through pipes of the shim; EOF when
        it has ended."""
        request = messages.Attach(container, stdin, stdout, stderr)
        _, fds = await self.call(request, messages.Done)
        streams = Streams()
        _distribute(streams, fds, stdin, stdout, stderr)
        return streams

    async def resize(
        self, width: int, height: int, *, container: str | None = None, exec_id: str | None = None
    ) -> None:
        """Set the terminal's size, in characters, of a container or of an exec session."""
        target = container if exec_id is None else None
        await self._ask(messages.Resize(width, height, target, exec_id), messages.Done)

    async def reopen_log(self, container: str) -> None:
        """Write to a new file at the log's path from now on; it exists when this returns."""
        await self._ask(messages.ReopenLog(container), messages.Done)

    async def state(self) -> messages.PodState:
        """Ask for the pod's state as the shim has it."""
        return await self._ask(messages.GetState(), messages.PodState)

    async def take_pod(
        self,
        sandbox_dir: str | os.PathLike[str],
        containers_dir: str | os.PathLike[str],
        *,
        network: bool = False,
    ) -> str | None:
        """Have the shim, to whose own folder this is a connection, serve a pod: `connect` to the
        pod's folder works then. The path of a new network namespace, which the shim holds, if
        `network` is true."""
        with _listener(sandbox_dir) as listener:
            request = messages.TakePod(os.fspath(sandbox_dir), os.fspath(containers_dir), network)
            answer = await self._ask(request, messages.NetworkNamespace, [listener.fileno()])
        return answer.netns_path

    async def shim(self) -> messages.ShimInfo:
        """Describe the shim. For a connection to the shim's own folder."""
        return await self._ask(messages.GetShim(), messages.ShimInfo)

    async def stop_pause(self) -> None:
        """End the pod's pause process; its network namespace stays until `shutdown`."""
        await self._ask(messages.StopPause(), messages.Done)

    async def forget(self, container: str) -> None:
        """Forget a container that has exited. Unknown containers are ignored."""
        await self._ask(messages.Forget(container), messages.Done)

    async def shutdown(self) -> None:
        """Have the shim drop the pod and its network namespace. Raises WrongState while a container
        or the pause process runs."""
        self.on_close = None
        await self._ask(messages.Shutdown(), messages.Done)
        self.close()

    def close(self) -> None:
        """Close the connection; the shim kills its exec sessions, nothing else changes."""
        why = "the connection to the shim was closed"
        self.on_close = None
        self._peer.close(why)
        self._break_sessions(why)

    async def _ask(
        self, request: Request, kind: type[Answered], fds: Sequence[int] = ()
    ) -> Answered:
        """Send a request and return its answer, which has no descriptors. `fds` are sent with the
        request and stay the caller's. Raises Error, PeerError for a malformed answer."""
        _, answering = self._peer.ask(request.to_message(), fds)
        return kind.of(await answered_without_fds(answering), PeerError)

    async def call(self, request: Request, kind: type[Answered]) -> tuple[Answered, list[int]]:
        """Send a request; return the answer and its descriptors, the caller's to close."""
        _, answering = self._peer.ask(request.to_message())
        fields, fds = await answered(answering)
        try:
            return kind.of(fields, PeerError), fds
        except PeerError:
            ipc.close_all(fds)
            raise

    def _received(self, message: ipc.Message) -> None:
        try:
            event = event_of(message)
        except Error as error:
            log.error("an event of a shim: %s", error)
            return
        if event is None:
            return
        if isinstance(event, ExecExited):
            session = self._execs.pop(event.exec, None)
            if session is not None and not session.exited.done():
                session.exited.set_result(event.exit_code)
        if self.on_event:
            self.on_event(event)

    def _lost(self) -> None:
        self.lost_sessions = [session for session in self._execs.values() if session.pid]
        self._break_sessions("the shim is gone")
        if self.on_close:
            self.on_close()

    def _break_sessions(self, why: str) -> None:
        for session in self._execs.values():
            fail(session.exited, why)
        self._execs.clear()


async def start_shim(
    zygote: Zygote, folder: str | os.PathLike[str], version: str = "", *, starter: str | None = None
) -> tuple[int, ShimClient]:
    """Fork a shim whose socket, record and log are in `folder`: its pid, and a connection, with
    whose end a shim without pods ends.

    The zygote must have been started with `pyrunc.shim.main` preloaded. The socket is bound here,
    so that there is no moment in which the shim lives but cannot be reached. `starter`
    (`module:class`) replaces the runtime library.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        with theirs, _listener(folder) as listener:
            arguments = messages.Arguments(
                os.fspath(folder), version, _own_oom_score(), starter, zygote.keeper
            )
            pid = await zygote.fork(SHIM, arguments, [listener.fileno(), theirs.fileno()])
    except BaseException:
        ours.close()
        raise
    return pid, ShimClient(ours, None, None)


def _own_oom_score() -> int:
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


@contextlib.contextmanager
def _listener(sandbox_dir: str | os.PathLike[str]) -> Iterator[socket.socket]:
    """Yield a socket that listens in the sandbox's folder; it replaces the socket of a dead
    shim."""
    with short_path(sandbox_dir) as path, _open_socket() as listener:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}/{messages.SOCKET}")
        listener.bind(f"{path}/{messages.SOCKET}")
        listener.listen(64)
        yield listener


def _open_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


async def _connect(sock: socket.socket, address: str, timeout_s: float) -> None:
    """connect(2) on a unix socket is immediate, or EAGAIN while the backlog is full."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"the shim at {address} accepts no connection") from None
            await asyncio.sleep(0.01)


def _distribute(
    streams: Streams, fds: Sequence[int], stdin: bool, stdout: bool, stderr: bool
) -> None:
    remaining = list(fds)
    if stdin:
        streams.stdin_fd = remaining.pop(0)
    if stdout:
        streams.stdout_fd = remaining.pop(0)
    if stderr and remaining:  # a container with a tty has no stderr
        streams.stderr_fd = remaining.pop(0)
    ipc.close_all(remaining)
