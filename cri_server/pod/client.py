"""The client of a shim: starts shims, connects to them again after a restart, calls them and
receives their events. For asyncio, without threads.

When a shim's socket closes, the shim is dead or has dropped the pod: every waiting call raises
Unavailable, and `on_close` is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cri_server.zygote.client import Zygote
from cri_server.zygote.peer import Peer, fail, wait_answer, wait_fields
from pyrunc import ipc
from pyrunc.errors import Error, NotFound, PeerError, ResourceExhausted, Unavailable
from pyrunc.kernel.fd import close_all, short_path
from pyrunc.records import Record, Request
from pyrunc.shim import messages
from pyrunc.shim.messages import (
    Event,
    ExecExited,
    Exit,
    event_of,
)

EventHandler = Callable[[Event], None]
Reply = TypeVar("Reply", bound=Record)
log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 2.0
SHIM = "pyrunc.shim.main:main"
"""The function that a shim's process runs; the zygote forks this process."""
MOST_FDS = ipc.MOST_FDS - 1
"""The largest number of descriptors that a caller can send with a request. The message can carry
one more, for the memfd with the text of a long request."""


@dataclass
class SessionStreams:
    """The descriptors of a session's streams, which the caller closes. With a tty, `stdout_fd` is
    the pty's master and `stdin_fd` a copy of it."""

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
class ExecSession(SessionStreams):
    """A process started by `exec`, and its streams. The future `exited` gets its exit code, or the
    exception Unavailable when the shim is lost. If the process ended before the shim answered,
    `output` is its stdout and stderr, and the session has no streams."""

    exec_id: str = ""
    container: str = ""
    pid: int = 0
    start_time: int = 0
    parts: Sequence[Sequence[Any]] = field(default=(), compare=False)
    output: tuple[bytes, bytes] | None = None
    exited: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ShimClient:
    """A connection to one shim. Use from one event loop; calls may overlap."""

    def __init__(self, sock: socket.socket, on_event: EventHandler | None = None) -> None:
        self.on_event = on_event
        self.on_close: Callable[[], None] | None = None
        """Called once when the connection ends without `close` or `shutdown`."""
        self.timed = False
        """Whether the shim measures each operation of a launch, which slows the launch down. The
        times are in the field `parts` of the shim's answers."""
        self._execs: dict[str, ExecSession] = {}
        self.lost_sessions: list[ExecSession] = []
        """Sessions that ran when the shim was lost."""
        self._peer = Peer(sock, "the shim", self._received, self._lost)

    @property
    def closed(self) -> bool:
        """Return whether the connection has ended."""
        return self._peer.lost

    @classmethod
    async def connect(
        cls, directory: str | os.PathLike[str], *, on_event: EventHandler | None = None
    ) -> ShimClient:
        """Connect to the shim of the sandbox folder `directory`. Raises NotFound without a living
        shim, Unavailable when the shim accepts no connection.

        `on_event(event)` is called for every event.
        """
        sock = _open_socket()
        try:
            with short_path(directory) as path:
                await _connect(sock, f"{path}/{messages.SOCKET}")
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            raise NotFound(f"no shim listens in {os.fspath(directory)}") from None
        except BaseException:
            sock.close()
            raise
        return cls(sock, on_event)

    async def start_pause(self) -> messages.PauseStarted:
        """Start the pod's pause process, which pause.json describes; return its pid and the path of
        the pod's network namespace. The path is valid as long as the shim lives."""
        return await self._ask(messages.StartPause(self.timed), messages.PauseStarted)

    async def create_container(
        self, request: messages.CreateContainer, fds: Sequence[int] = ()
    ) -> messages.ContainerCreated:
        """Have the shim compile the container from the files in the container's folder, and create
        its cgroup. `fds`: the mounts of the images in `request.images`, then the mount sources in
        `request.opened`; the caller must close them.

        Raises the error that the shim reports, Unavailable when the shim is lost, and
        ResourceExhausted for more descriptors than a message can carry.
        """
        if len(fds) > MOST_FDS:
            raise ResourceExhausted(
                f"the container's mounts need {len(fds)} descriptors of images and host paths;"
                f" the limit is {MOST_FDS}"
            )
        request = request.replace(timed=self.timed)
        return await self._ask(request, messages.ContainerCreated, fds)

    async def drop_container(self, container: str) -> None:
        """Have the shim drop a container that was created and will not be started; its cgroup
        stays. Unknown containers are ignored."""
        await self._ask(messages.DropContainer(container), messages.Done)

    async def start_container(self, container: str) -> messages.ContainerStarted:
        """Start a container that was created. When the start fails, the shim writes the container's
        exit.json and removes the cgroup. When the shim refuses the start, it writes no exit.json.
        Raises Error in both cases."""
        return await self._ask(messages.StartContainer(container), messages.ContainerStarted)

    async def take_over_pause(self) -> str | None:
        """Have this shim take over a dead shim's pause process, with the data and descriptors that
        the keeper stores. Return the path of the pod's network namespace, which this shim keeps
        open from now on. Return None if the dead shim had not opened a network namespace. Raises
        NotFound if the keeper has no entry of the process, Unavailable if no keeper answers."""
        return (await self._ask(messages.TakeOverPause(), messages.NetworkNamespace)).netns_path

    async def take_over_container(
        self,
        container: str,
        sessions: Sequence[ExecSession] = (),
        stdin: Sequence[int] = (),
        *,
        stdin_once: bool = False,
    ) -> None:
        """Have this shim take over a dead shim's container, with the data and descriptors that the
        keeper stores, and end the dead shim's exec `sessions` in the container. Raises NotFound if
        the keeper has no entry of the container, Unavailable if no keeper answers.

        - `stdin`: a list with the writing end of the container's stdin, or empty. The caller closes
          the descriptor.
        - `stdin_once`: stdin ends when its first client leaves.
        """
        ended = [[session.pid, session.start_time] for session in sessions]
        request = messages.TakeOverContainer(container, ended, stdin_once)
        await self._ask(request, messages.Done, stdin)

    async def exec(self, request: messages.StartExec) -> ExecSession:
        """Start a process in a container and return its session. The shim kills the process when
        this connection ends."""
        exec_id = request.exec
        session = ExecSession(exec_id=exec_id, container=request.container)
        self._execs[exec_id] = session
        try:
            request = request.replace(timed=self.timed)
            answer, fds = await self.call(request, messages.ExecStarted)
            if request.tty and answer.exit_code is None:
                session.stdout_fd = fds[0]
                # A copy, because each stream of a session closes its own descriptor.
                session.stdin_fd = os.dup(fds[0]) if request.stdin else None
        except BaseException as error:
            self._execs.pop(exec_id, None)
            session.close()
            if isinstance(error, (asyncio.CancelledError, OSError)):
                # The shim may have started the process, for which there is no session any more.
                self._peer.send({"id": 0, **messages.KillExec(exec_id).to_message()})
            raise
        session.pid, session.start_time, session.parts = answer.pid, answer.start_time, answer.parts
        if answer.exit_code is not None:
            self._execs.pop(exec_id, None)
            session.output = _output_of(answer)
            if not session.exited.done():  # the shim may have been lost after its answer
                session.exited.set_result(answer.exit_code)
        elif not request.tty:
            _distribute(session, fds, request.stdin, request.stdout, request.stderr)
        return session

    async def kill_exec(self, exec_id: str) -> None:
        """Kill the session's process and all its descendants, even if the process itself has exited
        already."""
        await self._ask(messages.KillExec(exec_id), messages.Done)

    async def stop(self, container: str, signal: int, timeout_s: float) -> Exit:
        """Send `signal` to the container, and SIGKILL after `timeout_s` (at once if it is 0 or
        less). Wait until the container has ended; return its exit.

        The shim still ends the container when this call is cancelled or the server dies. If the
        container is already being stopped, no second signal is sent, and the earliest deadline
        applies. Raises DeadlineExceeded if SIGKILL does not end the container.
        """
        return await self._ask(messages.Stop(container, int(signal), timeout_s), Exit)

    async def attach(
        self, container: str, *, stdin: bool = False, stdout: bool = True, stderr: bool = False
    ) -> SessionStreams:
        """Return pipes that carry the container's new output and its stdin. The output pipes reach
        end of file when the container has ended."""
        request = messages.Attach(container, stdin, stdout, stderr)
        _, fds = await self.call(request, messages.Done)
        streams = SessionStreams()
        _distribute(streams, fds, stdin, stdout, stderr)
        return streams

    async def resize(
        self, width: int, height: int, *, container: str | None = None, exec_id: str | None = None
    ) -> None:
        """Set the terminal's size, in characters, of a container or of an exec session."""
        await self._ask(messages.Resize(width, height, container, exec_id), messages.Done)

    async def reopen_log(self, container: str) -> None:
        """Have the shim continue the container's log in a new file at the same path; return when
        the file exists."""
        await self._ask(messages.ReopenLog(container), messages.Done)

    async def state(self) -> messages.PodState:
        """Ask the shim for the states of the pod's pause process and containers."""
        return await self._ask(messages.GetState(), messages.PodState)

    async def take_pod(
        self,
        sandbox_dir: str | os.PathLike[str],
        containers_dir: str | os.PathLike[str],
        *,
        network: bool = False,
        timeout_s: float | None = None,
    ) -> str | None:
        """Have the shim serve another pod: clients can then `connect` to the folder `sandbox_dir`.

        With `network` the shim creates a network namespace and keeps it open. Return the
        namespace's path, None without `network`. This call needs a connection to the shim's own
        folder, not to a pod's.

        Raises TimeoutError after `timeout_s`. After that, the shim will not serve the pod.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        request = messages.TakePod(
            os.fspath(sandbox_dir), os.fspath(containers_dir), network, deadline_s
        )
        async with asyncio.timeout(timeout_s):
            with _listener(sandbox_dir) as listener:
                answer = await self._ask(request, messages.NetworkNamespace, [listener.fileno()])
        return answer.netns_path

    async def shim(self) -> messages.ShimInfo:
        """Return the shim's pid, version and protocol. The connection must be to the shim's own
        folder, not to a pod's."""
        return await self._ask(messages.GetShim(), messages.ShimInfo)

    async def end_shim(self) -> None:
        """Have the shim log all output that it has read, and then end; its pods' processes run on.
        The shim's process ends shortly after the answer. Call this on a connection to the shim's
        own folder, not to a pod's. Raises Unsupported for a shim that does not know the call, and
        ResourceExhausted for a shim that continues because it cannot write a log."""
        await self._ask(messages.EndShim(), messages.Done)

    async def stop_pause(self) -> None:
        """End the pod's pause process; its network namespace stays until `shutdown`."""
        await self._ask(messages.StopPause(), messages.Done)

    async def forget(self, container: str) -> None:
        """Have the shim delete its state of a container that has exited. Unknown containers are
        ignored."""
        await self._ask(messages.Forget(container), messages.Done)

    async def shutdown(self) -> None:
        """Have the shim drop the pod and its network namespace. Raises WrongState while a container
        or the pause process runs."""
        # The shim closes the connection right after its answer.
        on_close, self.on_close = self.on_close, None
        try:
            await self._ask(messages.Shutdown(), messages.Done)
        except BaseException:
            self.on_close = on_close
            raise
        self.close()

    def close(self) -> None:
        """Close the connection. The shim kills the exec sessions of this connection; its pods
        continue."""
        why = "the connection to the shim was closed"
        self.on_close = None
        self._peer.close(why)
        self._break_sessions(why)

    async def _ask(self, request: Request, kind: type[Reply], fds: Sequence[int] = ()) -> Reply:
        """Send a request with the descriptors `fds`, which the caller closes. Return its answer,
        which has no descriptors. Raises the error that the shim reports, Unavailable when the shim
        is lost, PeerError for a malformed answer."""
        _, answering = self._peer.ask(request.to_message(), fds)
        return kind.of(await wait_fields(answering), PeerError)

    async def call(self, request: Request, kind: type[Reply]) -> tuple[Reply, list[int]]:
        """Send a request; return the answer and its descriptors, which the caller closes."""
        _, answering = self._peer.ask(request.to_message())
        fields, fds = await wait_answer(answering)
        try:
            return kind.of(fields, PeerError), fds
        except PeerError:
            close_all(fds)
            raise

    def _received(self, message: ipc.Message) -> None:
        try:
            event = event_of(message)
        except Error as error:
            log.error("cannot read an event of a shim: %s", error)
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
    """Have the zygote fork a shim whose socket, shim.json and log are in `folder`. Return the
    shim's pid and a connection to it. When this connection ends, the shim ends as soon as it has no
    pods.

    The zygote must have `pyrunc.shim.main` preloaded. The socket is bound before the fork, so that
    a living shim can always be reached.

    - `version`: the server's version, which the shim repeats when it is asked (`ShimClient.shim`).
    - `starter`: the class (`module:class`) that the shim uses instead of
      `pyrunc.shim.starter.Starter`.
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
    return pid, ShimClient(ours)


def _own_oom_score() -> int:
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


@contextlib.contextmanager
def _listener(sandbox_dir: str | os.PathLike[str]) -> Iterator[socket.socket]:
    """Yield a socket that listens in the sandbox's folder. The socket file of a dead shim is
    replaced."""
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


async def _connect(sock: socket.socket, address: str) -> None:
    """Connect to the unix socket `address`. Raises Unavailable when the socket's backlog stays full
    for `_CONNECT_TIMEOUT_S`."""
    deadline = asyncio.get_running_loop().time() + _CONNECT_TIMEOUT_S
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"the shim at {address} accepts no connection") from None
            await asyncio.sleep(0.01)


def _output_of(answer: messages.ExecStarted) -> tuple[bytes, bytes]:
    """Return stdout and stderr from the answer. Raises PeerError if they are missing or
    malformed."""
    try:
        stdout, stderr = answer.output
        return stdout.encode("latin-1"), stderr.encode("latin-1")
    except ValueError as error:
        raise PeerError(f"the shim sent no output of a command: {error}") from None


def _distribute(
    streams: SessionStreams, fds: Sequence[int], stdin: bool, stdout: bool, stderr: bool
) -> None:
    remaining = list(fds)
    if stdin:
        streams.stdin_fd = remaining.pop(0)
    if stdout:
        streams.stdout_fd = remaining.pop(0)
    if stderr and remaining:  # a container with a tty has no stderr
        streams.stderr_fd = remaining.pop(0)
    close_all(remaining)
