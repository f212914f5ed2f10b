"""Port forwarding: pairs of a data and an error stream, each joined to a TCP connection inside the
pod.

Over SPDY the client opens as many pairs as it likes, told apart by `requestid`; over WebSocket
there is one pair per port of the request. Either side of a connection may end its direction and go
on reading, but only for as long as the other direction moves bytes: kubectl up to 1.31 ends nothing
until the error stream ends (LINGER_S). A failure is a text on the error stream.

A dial is a process in the pod's network, a connection a descriptor of this one: both are bounded,
for a session and in all, dials also for a pod, so that pods that accept no connections leave turns
for others (`Dials`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cri_server.streaming import failures
from cri_server.streaming.backend import Backend
from cri_server.streaming.descriptors import read_some, write_all
from cri_server.streaming.multiplex import MultiplexedStream
from cri_server.streaming.spdy.frames import Status
from cri_server.streaming.streams import Inbound, Outbound, StreamGone
from cri_server.streaming.websocket import Channel
from pyrunc.errors import Error, ResourceExhausted

PROTOCOL = "portforward.k8s.io"
PAIRING_S = 30.0
# of a session, with those that are only to be told that there are too many connections
PAIRS_LIMIT = 512
SESSION_LIMIT, LIMIT = 256, 2048  # connections of a session, and in all
SESSION_DIALS_LIMIT, POD_DIALS_LIMIT, DIALS_LIMIT = 8, 8, 32  # of these, dials under way
DIAL_WAIT_S = 20.0  # twice as long as a dial may take
# How long a direction may pause, and how long it may last, once the other one has ended. containerd
# ends both after one second (internal/cri/server/sandbox_portforward_linux.go), which truncates an
# answer that takes longer. Ten seconds are not more because kubectl up to 1.31 reads no other
# stream while the pod sends to a local client that has left.
LINGER_S, LINGER_LIMIT_S = 1.0, 10.0
# a channel's number is an octet, 255 means something else, a port takes two
CHANNEL_PORTS_LIMIT = 127


@dataclass(eq=False, slots=True)
class Connection:
    """One forwarded connection; `half_closed` when one direction has ended, so that the other one
    ends soon."""

    half_closed: bool = False


class Dials:
    """Turns to dial into pods: DIALS_LIMIT in all, POD_DIALS_LIMIT for a pod. A free turn goes to
    the pod with the fewest dials under way; among equals to the dial that has waited longest."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()  # by pod
        self._waiting: dict[asyncio.Future[None], str] = {}  # a turn that is due to a pod

    @contextlib.asynccontextmanager
    async def turn(self, pod: str) -> AsyncIterator[None]:
        """Wait for a turn to dial into `pod` and keep it while inside."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = pod
        self._assign()
        try:
            await turn
            yield
        finally:
            if self._waiting.pop(turn, None) is None:  # it was assigned
                self._under_way -= Counter({pod: 1})
            self._assign()

    def _assign(self) -> None:
        while self._under_way.total() < DIALS_LIMIT:
            # One that is done belongs to a task that was cancelled and has not run since.
            pods = {turn: pod for turn, pod in self._waiting.items() if not turn.done()}
            dials = {turn: self._under_way[pod] for turn, pod in pods.items()}
            turn = min(dials, key=dials.__getitem__, default=None)
            if turn is None or dials[turn] >= POD_DIALS_LIMIT:
                return
            self._under_way[self._waiting.pop(turn)] += 1
            turn.set_result(None)


class Forwarded:
    """Counts connections into pods: those of a session, and in its `whole` those of all sessions."""

    def __init__(self, whole: Forwarded | None = None, pod: str = "") -> None:
        """`pod`: the sandbox id of a session's pod."""
        self._whole, self._pod = whole, pod
        self.limit = LIMIT if whole is None else SESSION_LIMIT
        self._dials: Dials = Dials() if whole is None else whole._dials
        self._session_dials = asyncio.Semaphore(SESSION_DIALS_LIMIT)
        self._open: set[Connection] = set()
        self._closed = asyncio.Event()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    def of_session(self, pod: str) -> Forwarded:
        """What a new session into this sandbox counts with."""
        return Forwarded(self, pod)

    @contextlib.asynccontextmanager
    async def counted(self, connection: Connection) -> AsyncIterator[None]:
        """Count `connection` while inside. Raises ResourceExhausted."""
        await self._wait_below_limit()
        self._open.add(connection)
        try:
            if self._whole is None:
                yield
            else:
                async with self._whole.counted(connection):
                    yield
        finally:
            self._open.remove(connection)
            self._closed.set()

    async def _wait_below_limit(self) -> None:
        """Wait for half-closed connections to make room; without any, raises ResourceExhausted."""
        while len(self._open) >= self.limit:
            if not any(connection.half_closed for connection in self._open):
                where = "in this session" if self._whole is not None else "of this node"
                raise ResourceExhausted(
                    f"{self.limit} forwarded connections {where} are open, which is the limit"
                )
            self._closed.clear()
            await self._closed.wait()

    @contextlib.asynccontextmanager
    async def dialing(self) -> AsyncIterator[None]:
        """Wait for a turn to dial and keep it while inside."""
        async with self._session_dials, self._dials.turn(self._pod):
            yield


async def forward(
    backend: Backend,
    sandbox_id: str,
    port: int,
    forwarded: Forwarded,
    data: Outbound,
    inbound: Inbound,
    *,
    half_close: bool = True,
) -> str:
    """Connect to the pod and copy until both directions have ended; what went wrong in words, or
    nothing.

    Without `half_close` the client cannot say that it has ended its direction: the pod's end is the
    end of both.
    """
    try:
        connection = Connection()
        async with forwarded.counted(connection):
            with await _dial(backend, sandbox_id, port, forwarded) as sock:
                sock.setblocking(False)
                return await _copy_both(sock, port, connection, data, inbound, half_close)
    except Error as error:
        failures.note(f"port-forward to port {port} of sandbox {sandbox_id}", error)
        return f"forwarding to port {port}: {error.message}"
    except OSError as error:
        return f"forwarding to port {port}: {error.strerror}"


async def _dial(
    backend: Backend, sandbox_id: str, port: int, forwarded: Forwarded
) -> socket.socket:
    """Connect when it is this one's turn. Raises Error, OSError."""
    async with contextlib.AsyncExitStack() as turn:
        try:
            async with asyncio.timeout(DIAL_WAIT_S):
                await turn.enter_async_context(forwarded.dialing())
        except TimeoutError:
            raise ResourceExhausted("too many connections are being made") from None
        return await backend.dial(sandbox_id, port)


async def _copy_both(
    sock: socket.socket,
    port: int,
    connection: Connection,
    data: Outbound,
    inbound: Inbound,
    half_close: bool,
) -> str:
    copier = _Copier(sock, data, inbound)
    to_client = asyncio.create_task(copier.to_client())
    to_pod = asyncio.create_task(copier.to_pod())
    try:
        if half_close:
            await asyncio.wait((to_client, to_pod), return_when=asyncio.FIRST_COMPLETED)
            connection.half_closed = True
            await copier.linger(to_client if to_pod.done() else to_pod)
        else:
            await asyncio.wait((to_client,))
        errors = [task.exception() for task in (to_client, to_pod) if task.done()]
        for error in errors:
            if isinstance(error, OSError):
                return f"forwarding to port {port}: {error.strerror}"
            if error is not None and not isinstance(error, StreamGone):
                raise error
        return ""
    finally:
        for task in (to_client, to_pod):
            task.cancel()
        await asyncio.gather(to_client, to_pod, return_exceptions=True)


class _Copier:
    """Copies the two directions of one connection and counts the pieces that have moved."""

    def __init__(self, sock: socket.socket, data: Outbound, inbound: Inbound) -> None:
        self._socket, self._data, self._inbound = sock, data, inbound
        self._pieces = 0

    async def to_pod(self) -> None:
        """Copy what the client sends; return when the client or the pod has ended this direction."""
        try:
            while data := await self._inbound.read():
                await write_all(self._socket.fileno(), data)
                self._pieces += 1
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            # The pod has closed the connection; what it sent before is still on its way to the
            # client.
            self._inbound.discard()

    async def to_client(self) -> None:
        """Copy what the pod sends; return when the pod has ended this direction."""
        while received := await read_some(self._socket.fileno()):
            await self._data.write(received)
            self._pieces += 1
        await self._data.end()

    async def linger(self, last: asyncio.Task[None]) -> None:
        """Wait for the direction that is left: until it ends, pauses for LINGER_S, or
        LINGER_LIMIT_S have passed."""
        end_s = asyncio.get_running_loop().time() + LINGER_LIMIT_S
        pieces = -1
        while (
            not last.done() and pieces != self._pieces and asyncio.get_running_loop().time() < end_s
        ):
            pieces = self._pieces
            await asyncio.wait((last,), timeout=LINGER_S)


@dataclass(slots=True)
class _Pair:
    """The streams of one request; complete when both are there."""

    data: MultiplexedStream | None = None
    error: MultiplexedStream | None = None
    port: int = 0
    expiry: asyncio.TimerHandle | None = None


class Forwarder:
    """Sorts the streams of a SPDY connection into pairs and runs a task for each pair."""

    def __init__(self, backend: Backend, sandbox_id: str, forwarded: Forwarded) -> None:
        self._backend, self._sandbox_id = backend, sandbox_id
        self._forwarded = forwarded.of_session(sandbox_id)
        self._pairs: dict[str, _Pair] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, stream: MultiplexedStream) -> None:
        """A stream of the client: the first or second of its pair, or reset if it makes no sense."""
        kind, port = stream.header("streamtype"), _port(stream.header("port"))
        if kind not in ("data", "error") or port is None:
            stream.reset(Status.PROTOCOL_ERROR)
            return
        request = stream.header("requestid") or self._implied(kind, stream.stream_id)
        pair = self._pairs.get(request)
        if pair is None:
            if len(self._pairs) + len(self._tasks) >= PAIRS_LIMIT:
                stream.reset(Status.REFUSED_STREAM)
                return
            pair = self._pairs[request] = _Pair(port=port)
            pair.expiry = asyncio.get_running_loop().call_later(PAIRING_S, self._expire, request)
        if port != pair.port or getattr(pair, kind) is not None:
            stream.reset(Status.PROTOCOL_ERROR)
            return
        setattr(pair, kind, stream)
        self._start_if_complete(request, pair)

    @staticmethod
    def _implied(kind: str, stream_id: int) -> str:
        """Clients older than request ids open the error stream first and the data stream right
        behind it."""
        return f"stream {stream_id if kind == 'error' else stream_id - 2}"

    def _start_if_complete(self, request: str, pair: _Pair) -> None:
        if pair.data is None or pair.error is None:
            return
        del self._pairs[request]
        if pair.expiry is not None:
            pair.expiry.cancel()
        task = asyncio.create_task(self._run(pair.data, pair.error, pair.port))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, data: MultiplexedStream, error: MultiplexedStream, port: int) -> None:
        error.inbound.discard()
        forwarding = asyncio.create_task(
            forward(self._backend, self._sandbox_id, port, self._forwarded, data, data.inbound)
        )
        dropped = asyncio.create_task(data.gone.wait())
        try:
            await asyncio.wait((forwarding, dropped), return_when=asyncio.FIRST_COMPLETED)
            text = forwarding.result() if forwarding.done() else ""
            if text:
                await error.write(text.encode())
                await error.end()
                data.reset(Status.INTERNAL_ERROR)
            else:
                await data.finish()
                await error.finish()
        except StreamGone:
            pass
        finally:
            forwarding.cancel()
            dropped.cancel()
            await asyncio.gather(forwarding, dropped, return_exceptions=True)

    def _expire(self, request: str) -> None:
        pair = self._pairs.pop(request)
        for stream in (pair.data, pair.error):
            if stream is not None:
                stream.reset(Status.CANCEL)

    async def close(self) -> None:
        """End all connections."""
        for pair in self._pairs.values():
            if pair.expiry is not None:
                pair.expiry.cancel()
        self._pairs.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _port(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    return int(text) if 0 < int(text) < 65536 else None


async def forward_channels(
    backend: Backend,
    sandbox_id: str,
    forwarded: Forwarded,
    ports: tuple[int, ...],
    channels: list[tuple[Channel, Channel]],
) -> None:
    """The WebSocket form: data and error channel of each port, both of which start with the port
    (16 bits, little end)."""
    for port, pair in zip(ports, channels, strict=True):
        for channel in pair:
            await channel.write(port.to_bytes(2, "little"))
    own = forwarded.of_session(sandbox_id)

    async def one(port: int, data: Channel, error: Channel) -> None:
        error.inbound.discard()
        text = await forward(backend, sandbox_id, port, own, data, data.inbound, half_close=False)
        if text:
            with contextlib.suppress(StreamGone):
                await error.write(text.encode())

    # Not gather(): when one fails, that leaves the others running, with nothing to end them.
    async with asyncio.TaskGroup() as group:
        for port, pair in zip(ports, channels, strict=True):
            group.create_task(one(port, *pair))
