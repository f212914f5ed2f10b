"""The server's side of a shim: start one, find it again after a restart, call it, hear its events. asyncio, no threads.

A shim whose socket closes is dead or leaving: every call that waits then raises Unavailable, and `on_close` is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyrunc import ipc
from pyrunc.compiler.client import CompiledLaunch
from pyrunc.errors import NotFound, Unavailable
from pyrunc.peer import Answer, Peer, answered, fail
from pyrunc.shim import messages
from pyrunc.zygote.client import Zygote

EventHandler = Callable[[dict[str, Any]], None]
_CONNECT_TIMEOUT_S = 2.0
SHIM = "pyrunc.shim.main:main"
"""What a zygote forks, and may keep a spare child of."""


@dataclass(frozen=True)
class StartedShim:
    """A shim. `netns_path`: the network namespace that it had made ahead; None: `make_network` makes one."""

    pid: int
    netns_path: str | None


class Kept:
    """What another shim would need to go on with a holder or a container: see `pyrunc.shim.kept`."""

    __slots__ = ("fds", "fields")

    def __init__(self, fields: dict[str, Any], fds: list[int]) -> None:
        """Owns the descriptors."""
        self.fields, self.fds = fields, fds

    def close(self) -> None:
        """It has ended, or another server keeps it."""
        ipc.close_all(self.fds)
        self.fds = []


@dataclass(frozen=True)
class Started:
    """A process that runs. `start_time` is field 22 of /proc/PID/stat; `started_at_ns` is wall-clock time.

    `parts`, here and below: where the time of the start went (`pyrunc.parts`).
    """

    pid: int
    start_time: int
    started_at_ns: int
    kept: Kept = field(compare=False)
    parts: Sequence[Sequence[Any]] = field(default=(), compare=False)


@dataclass(frozen=True)
class StartedHolder:
    """The pod's holder. `netns_path` (`/proc/<shim>/fd/<n>`) is valid as long as the shim lives; None on the host's network."""

    pid: int
    start_time: int
    netns_path: str | None
    kept: Kept | None = field(default=None, compare=False)
    parts: Sequence[Sequence[Any]] = field(default=(), compare=False)


@dataclass(frozen=True)
class Exit:
    """How a container ended. `exit_code` is 128 + n for signal n; `reason` is set for OOMKilled and StartError."""

    exit_code: int
    signal: int | None
    finished_at_ns: int
    oom_killed: bool
    reason: str | None = None
    message: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Exit:
        """From an exit record, an `exit` event or an answer."""
        return cls(
            int(fields["exit_code"]),
            fields.get("signal"),
            int(fields["finished_at_ns"]),
            bool(fields.get("oom_killed")),
            fields.get("reason"),
            fields.get("message"),
        )


@dataclass
class Streams:
    """Descriptors of a session, the caller's to close. An exec with tty: `stdout_fd` is the pty's master, `stdin_fd` a copy."""

    stdin_fd: int | None = None
    stdout_fd: int | None = None
    stderr_fd: int | None = None

    def close(self) -> None:
        """Close what is open still."""
        for name in ("stdin_fd", "stdout_fd", "stderr_fd"):
            fd = getattr(self, name)
            if fd is not None:
                os.close(fd)
                setattr(self, name, None)


@dataclass
class ExecSession(Streams):
    """A process started by `exec`. `exited` gets its exit code (Unavailable when the shim is lost)."""

    exec_id: str = ""
    container: str = ""
    pid: int = 0
    start_time: int = 0
    parts: Sequence[Sequence[Any]] = field(default=(), compare=False)
    exited: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class ContainerState:
    """One container as its shim knows it; `exit` once it has ended."""

    id: str
    pid: int
    start_time: int
    started_at_ns: int
    running: bool
    exit: Exit | None = None


@dataclass(frozen=True)
class ShimState:
    """All that a shim knows, for a server that was restarted. `netns_path`: the namespace that it pins, also without a holder."""

    protocol: int
    pid: int
    holder: StartedHolder | None
    netns_path: str | None
    holder_running: bool
    containers: list[ContainerState]
    execs: list[str]


class ShimClient:
    """A connection to one shim. Use from one event loop; calls may overlap."""

    def __init__(
        self, sock: socket.socket, on_event: EventHandler | None, on_close: Callable[[], None] | None
    ) -> None:
        self.on_event = on_event
        self.on_close = on_close
        self._execs: dict[str, ExecSession] = {}
        self.lost_sessions: list[ExecSession] = []
        """Those that ran when the shim went, which it has not ended."""
        self._peer = Peer(sock, "the shim", self._event, self._lost)

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
        """Connect to the shim of the sandbox folder `directory`. Raises NotFound (none lives there), DeadlineExceeded.

        `on_event(event)` gets every event object, `on_close()` is called once when the connection has ended by itself.
        """
        sock = _open_socket()
        try:
            folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                address = f"/proc/self/fd/{folder}/{messages.SOCKET}"  # sun_path has room for 107 bytes only
                await _connect(sock, address, timeout_s)
            finally:
                os.close(folder)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            raise NotFound(f"no shim in {os.fspath(directory)}") from None
        except BaseException:
            sock.close()
            raise
        return cls(sock, on_event, on_close)

    async def make_network(self) -> str:
        """The path of the network namespace that the shim pins for the pod, made if it is not there."""
        answer = await self._ask("make_network")
        return str(answer["netns_path"])

    async def start_holder(self, launch: CompiledLaunch) -> StartedHolder:
        """Start the pod's pause process. The launch is closed, unless this raises before it is sent; here and below."""
        answer, fds = await self._call("start_holder", launch)
        kept = Kept(answer["kept"], fds)
        return StartedHolder(
            answer["pid"], answer["start_time"], answer.get("netns_path"), kept, answer.get("parts", ())
        )

    async def start_container(self, container: str, launch: CompiledLaunch) -> Started:
        """Start the container; on failure its exit record is written and its cgroup removed."""
        answer, fds = await self._call("start_container", launch, container=container)
        kept = Kept(answer["kept"], fds)
        return Started(
            answer["pid"], answer["start_time"], answer["started_at_ns"], kept, answer.get("parts", ())
        )

    async def keep(self, container: str | None = None) -> Kept:
        """What another shim would need to go on with this container, or with the holder, which runs. The caller's to close. Raises
        WrongState, Unsupported (an older shim)."""
        named = {} if container is None else {"container": container}
        answer, fds = await self._call("keep", None, **named)
        return Kept(answer["kept"], fds)

    async def adopt_holder(self, kept: Kept) -> str | None:
        """Go on with the holder of a shim that was lost; the path of the network namespace that this shim pins from now on. `kept`
        stays the caller's, here and below."""
        answer = await self._ask("adopt_holder", kept, kept=kept.fields)
        found = answer["netns_path"]
        return None if found is None else str(found)

    async def adopt_container(self, container: str, kept: Kept, sessions: Sequence[ExecSession] = ()) -> None:
        """Go on with a container of a shim that was lost; `sessions`, which nobody holds, are ended."""
        ended = [[session.pid, session.start_time] for session in sessions]
        await self._ask("adopt_container", kept, container=container, kept=kept.fields, sessions=ended)

    async def exec(
        self,
        container: str,
        exec_id: str,
        launch: CompiledLaunch,
        *,
        stdin: bool = False,
        stdout: bool = True,
        stderr: bool = True,
        tty: bool = False,
    ) -> ExecSession:
        """Run a process in the container. The session is killed when this connection ends."""
        session = ExecSession(exec_id=exec_id, container=container)
        self._execs[exec_id] = session
        try:
            answer, fds = await self._call(
                "exec",
                launch,
                container=container,
                exec=exec_id,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                tty=tty,
            )
        except BaseException as error:
            self._execs.pop(exec_id, None)
            if isinstance(error, asyncio.CancelledError):
                self._peer.tell({"id": 0, "call": "kill_exec", "exec": exec_id})
            raise
        session.pid, session.parts = answer["pid"], answer.get("parts", ())
        session.start_time = answer.get("start_time", 0)
        if tty:
            session.stdout_fd = fds[0]
            session.stdin_fd = os.dup(fds[0]) if stdin else None
        else:
            _distribute(session, fds, stdin, stdout, stderr)
        return session

    async def kill_exec(self, exec_id: str) -> None:
        """Kill the session's process and all its descendants; also when the process itself has exited already."""
        await self._ask("kill_exec", exec=exec_id)

    async def stop(self, container: str, signal: int, timeout_s: float) -> Exit:
        """Send `signal`, SIGKILL after `timeout_s` (at once if it is not above 0), return when the container has exited.

        The escalation goes on in the shim when this call is cancelled or the server dies. Of several stops the first
        one's signal is sent and the earliest deadline holds. Raises DeadlineExceeded if SIGKILL does not end it.
        """
        return Exit.of(await self._ask("stop", container=container, signal=int(signal), timeout_s=timeout_s))

    async def signal(self, container: str, signal: int) -> None:
        """Send `signal` to the container's first process."""
        await self._ask("signal", container=container, signal=int(signal))

    async def attach(
        self, container: str, *, stdin: bool = False, stdout: bool = True, stderr: bool = False
    ) -> Streams:
        """Follow the container's new output and feed its stdin, through pipes of the shim; EOF when it has ended."""
        _, fds = await self._call("attach", container=container, stdin=stdin, stdout=stdout, stderr=stderr)
        streams = Streams()
        _distribute(streams, fds, stdin, stdout, stderr)
        return streams

    async def resize(
        self, width: int, height: int, *, container: str | None = None, exec_id: str | None = None
    ) -> None:
        """Set the terminal's size, in characters, of a container or of an exec session."""
        target = {"container": container} if exec_id is None else {"exec": exec_id}
        await self._ask("resize", width=width, height=height, **target)

    async def reopen_log(self, container: str) -> None:
        """Write to a new file at the log's path from now on; it exists when this returns."""
        await self._ask("reopen_log", container=container)

    async def state(self) -> ShimState:
        """What the shim knows."""
        answer = await self._ask("state")
        holder = answer.get("holder")
        return ShimState(
            protocol=answer["protocol"],
            pid=answer["pid"],
            holder=holder and StartedHolder(holder["pid"], holder["start_time"], holder.get("netns_path")),
            netns_path=answer.get("netns_path") or (holder and holder.get("netns_path")),
            holder_running=bool(holder and holder["running"]),
            containers=[_container_state(entry) for entry in answer["containers"]],
            execs=list(answer["execs"]),
        )

    async def take_pod(
        self, sandbox_dir: str | os.PathLike[str], containers_dir: str | os.PathLike[str]
    ) -> StartedShim:
        """Another pod for the same process; `ShimClient.connect` to its folder works then. Unsupported: an older shim."""
        with _listener(sandbox_dir) as listener:
            folders = {"sandbox_dir": os.fspath(sandbox_dir), "containers_dir": os.fspath(containers_dir)}
            _, answering = self._peer.ask({"call": "take_pod", **folders}, [listener.fileno()])
            answer, fds = await answered(answering)
        ipc.close_all(fds)
        return StartedShim(int(answer["pid"]), None)

    async def stop_holder(self) -> None:
        """End the pod's holder; its network namespace stays until `shutdown`."""
        await self._ask("stop_holder")

    async def forget(self, container: str) -> None:
        """Drop an exited container. Unknown ones are fine."""
        await self._ask("forget", container=container)

    async def shutdown(self) -> None:
        """End the shim, which closes the network namespace. Raises WrongState while a container or the holder runs."""
        self.on_close = None
        await self._ask("shutdown")
        self.close()

    def close(self) -> None:
        """Hang up; exec sessions of this connection are killed, nothing else changes."""
        why = "the connection to the shim was closed"
        self.on_close = None
        self._peer.close(why)
        self._break_sessions(why)

    async def _ask(
        self, call: str, sent: CompiledLaunch | Kept | None = None, **parameters: Any
    ) -> dict[str, Any]:
        answer, fds = await self._call(call, sent, **parameters)
        ipc.close_all(fds)
        return answer

    async def _call(self, call: str, sent: CompiledLaunch | Kept | None = None, **parameters: Any) -> Answer:
        """`sent`: what goes along with its descriptors. Those of a launch are closed as soon as they are on their way: ours would keep
        a scope's placeholder in the container's cgroup until after the answer."""
        question = {"call": call, **parameters}
        if isinstance(sent, CompiledLaunch):
            question["compiled"] = sent.fields
        _, answer = self._peer.ask(question, sent.fds if sent is not None else ())
        if isinstance(sent, CompiledLaunch):
            sent.close()
        return await answered(answer)

    def _event(self, event: dict[str, Any]) -> None:
        if event["event"] == "exec_exit":
            session = self._execs.pop(event["exec"], None)
            if session is not None and not session.exited.done():
                session.exited.set_result(int(event["exit_code"]))
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
    zygote: Zygote,
    sandbox_dir: str | os.PathLike[str],
    containers_dir: str | os.PathLike[str],
    *,
    starter: str | None = None,
) -> StartedShim:
    """Fork a shim for the sandbox whose folder is `sandbox_dir`. `ShimClient.connect` works at once.

    The zygote must have been started with `pyrunc.shim.main` preloaded. The socket is bound here, so that there is no
    moment in which the shim lives but cannot be reached; a stale socket file of a dead shim is replaced. `starter`
    (`module:class`) replaces the runtime library.
    """
    with _listener(sandbox_dir) as listener:
        arguments = {"sandbox_dir": os.fspath(sandbox_dir), "containers_dir": os.fspath(containers_dir)}
        arguments |= {"starter": starter} if starter else {}
        forked = await zygote.fork(SHIM, arguments, [listener.fileno()])
    network = forked.prepared.get("network")
    return StartedShim(forked.pid, None if network is None else f"/proc/{forked.pid}/fd/{network}")


@contextlib.contextmanager
def _listener(sandbox_dir: str | os.PathLike[str]) -> Iterator[socket.socket]:
    """A socket that listens in the sandbox's folder, in place of a dead shim's."""
    folder = os.open(sandbox_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = _open_socket()
    try:
        try:
            os.unlink(messages.SOCKET, dir_fd=folder)
        except FileNotFoundError:
            pass
        listener.bind(f"/proc/self/fd/{folder}/{messages.SOCKET}")
        listener.listen(64)
        yield listener
    finally:
        listener.close()
        os.close(folder)


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


def _distribute(streams: Streams, fds: Sequence[int], stdin: bool, stdout: bool, stderr: bool) -> None:
    remaining = list(fds)
    if stdin:
        streams.stdin_fd = remaining.pop(0)
    if stdout:
        streams.stdout_fd = remaining.pop(0)
    if stderr and remaining:  # a container with a tty has no stderr
        streams.stderr_fd = remaining.pop(0)


def _container_state(entry: Mapping[str, Any]) -> ContainerState:
    ended = entry.get("exit")
    return ContainerState(
        id=entry["id"],
        pid=entry["pid"],
        start_time=entry["start_time"],
        started_at_ns=entry["started_at_ns"],
        running=entry["running"],
        exit=Exit.of(ended) if ended else None,
    )
