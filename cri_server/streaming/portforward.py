"""Port forwarding: connects pairs of a data stream and an error stream to TCP connections in the
pod.

Over SPDY the client opens any number of pairs. The streams of a pair have the same header
`requestid`. Over WebSocket there is one pair for each port of the request. A failure is sent as
text on the error stream.

Over SPDY, either the client or the pod may half-close a connection. The server then copies the
other direction until that direction ends, pauses for `LINGER_S` or has lasted `LINGER_LIMIT_S`, and
closes the connection. It does not wait longer, because kubectl up to 1.31 closes nothing until the
error stream ends.

Dials and connections are limited per session and in total: a dial costs a process in the pod's
network, a connection costs a descriptor of the server. Dials are also limited per pod, so that pods
which accept no connections do not block others (`Dials`).
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
from cri_server.streaming.websocket import WebSocketChannel
from pyrunc.errors import Error, ResourceExhausted

PROTOCOL = "portforward.k8s.io"
PAIRING_S = 30.0
# Pairs of a session; more than connections, because a pair may only carry their refusal.
PAIRS_LIMIT = 512
SESSION_LIMIT, LIMIT = 256, 2048  # connections per session and in total
SESSION_DIALS_LIMIT = 8  # running dials, here and below
POD_DIALS_LIMIT = 8
DIALS_LIMIT = 32
DIAL_WAIT_S = 20.0  # twice the timeout of a dial
# The longest pause, and the longest duration, of one direction after the other has ended.
# containerd ends both after one second (internal/cri/server/sandbox_portforward_linux.go), which
# truncates longer responses. Not more than ten seconds, because kubectl up to 1.31 reads no other
# stream while the pod sends to a local client that has disconnected.
LINGER_S, LINGER_LIMIT_S = 1.0, 10.0
# A channel's number is an octet, 255 is reserved, and a port takes two channels.
CHANNEL_PORTS_LIMIT = 127


@dataclass(eq=False, slots=True)
class ForwardedConnection:
    """One forwarded connection. `half_closed`: one direction has ended; the other may last at most
    `LINGER_LIMIT_S` longer."""

    half_closed: bool = False


class Dials:
    """Schedules dials. At most `DIALS_LIMIT` dials run at once, at most `POD_DIALS_LIMIT` of them
    into one pod. The next dial goes into the pod with the fewest running dials. If several pods
    have equally few, the dial that has waited longest is next."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()  # by pod
        self._waiting: dict[asyncio.Future[None], str] = {}  # turn -> pod

    @contextlib.asynccontextmanager
    async def turn(self, pod: str) -> AsyncIterator[None]:
        """Wait until a dial into `pod` may run. The dial counts as running during the `with`
        block."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = pod
        self._assign()
        try:
            await turn
            yield
        finally:
            if self._waiting.pop(turn, None) is None:  # it was assigned
                self._running -= Counter({pod: 1})
            self._assign()

    def _assign(self) -> None:
        while self._running.total() < DIALS_LIMIT:
            # A turn that is done belongs to a cancelled task, which has not run since.
            pods = {turn: pod for turn, pod in self._waiting.items() if not turn.done()}
            dials = {turn: self._running[pod] for turn, pod in pods.items()}
            turn = min(dials, key=dials.__getitem__, default=None)
            if turn is None or dials[turn] >= POD_DIALS_LIMIT:
                return
            self._running[self._waiting.pop(turn)] += 1
            turn.set_result(None)


class ForwardLimits:
    """Limits forwarded connections and dials. There is one object for the whole server and one for
    each session; a session's connections and dials count in both."""

    def __init__(self, whole: ForwardLimits | None = None, pod: str = "") -> None:
        """Make the limits of one session that forwards ports of the sandbox `pod`. `whole`: the
        limits of the whole server. Without arguments make the limits of the whole server."""
        self._whole, self._pod = whole, pod
        self.limit = LIMIT if whole is None else SESSION_LIMIT
        self._dials: Dials = Dials() if whole is None else whole._dials
        self._session_dials = asyncio.Semaphore(SESSION_DIALS_LIMIT)
        self._open: set[ForwardedConnection] = set()
        self._closed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def counted(self, connection: ForwardedConnection) -> AsyncIterator[None]:
        """Count `connection` as open during the `with` block, in these limits and in those of the
        whole server. At a limit, first wait until a half-closed connection ends. Raises
        ResourceExhausted if no connection is half-closed."""
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
        """While the limit is reached, wait until a half-closed connection ends. Raises
        ResourceExhausted if no connection is half-closed."""
        while len(self._open) >= self.limit:
            if not any(connection.half_closed for connection in self._open):
                where = "of this session" if self._whole is not None else "of this node"
                raise ResourceExhausted(
                    f"the limit of {self.limit} forwarded connections {where} is reached"
                )
            self._closed.clear()
            await self._closed.wait()

    @contextlib.asynccontextmanager
    async def dialing(self) -> AsyncIterator[None]:
        """Wait until a dial of this session may run. The dial counts as running during the `with`
        block."""
        async with self._session_dials, self._dials.turn(self._pod):
            yield


async def forward(
    backend: Backend,
    sandbox_id: str,
    port: int,
    limits: ForwardLimits,
    data: Outbound,
    inbound: Inbound,
    *,
    half_close: bool = True,
) -> str:
    """Connect to `port` in the pod, and copy data between client and pod until both directions have
    ended. Return an error message, empty on success.

    `data`, `inbound`: the client's data stream, to and from the client. With `half_close` False
    (WebSocket) the client cannot end its direction alone, so both directions end when the pod
    closes the connection.
    """
    try:
        connection = ForwardedConnection()
        async with limits.counted(connection):
            with await _dial(backend, sandbox_id, port, limits) as sock:
                sock.setblocking(False)
                return await _copy_both(sock, port, connection, data, inbound, half_close)
    except Error as error:
        failures.log_failure(f"port-forward to port {port} of sandbox {sandbox_id}", error)
        return f"forwarding to port {port}: {error.message}"
    except OSError as error:
        return f"forwarding to port {port}: {error.strerror}"


async def _dial(
    backend: Backend, sandbox_id: str, port: int, limits: ForwardLimits
) -> socket.socket:
    """Connect to `port` in the pod as soon as the limits allow a dial. Raises ResourceExhausted if
    they allow none within `DIAL_WAIT_S`, and the errors of `Backend.dial`."""
    async with contextlib.AsyncExitStack() as turn:
        try:
            async with asyncio.timeout(DIAL_WAIT_S):
                await turn.enter_async_context(limits.dialing())
        except TimeoutError:
            raise ResourceExhausted("too many connections are being opened") from None
        return await backend.dial(sandbox_id, port)


async def _copy_both(
    sock: socket.socket,
    port: int,
    connection: ForwardedConnection,
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
    """Copies both directions of a connection. Counts the copied chunks, so that `linger` can detect
    a pause."""

    def __init__(self, sock: socket.socket, data: Outbound, inbound: Inbound) -> None:
        self._socket, self._data, self._inbound = sock, data, inbound
        self._chunks = 0

    async def to_pod(self) -> None:
        """Copy data from the client to the pod until the client ends its data or the pod closes the
        connection."""
        try:
            while data := await self._inbound.read():
                await write_all(self._socket.fileno(), data)
                self._chunks += 1
            # The pod may still answer a request that ends with EOF, such as that of nc(1).
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            # The pod has closed the connection; `to_client` still copies its last data.
            self._inbound.discard()

    async def to_client(self) -> None:
        """Copy data from the pod to the client until the pod ends its data."""
        while received := await read_some(self._socket.fileno()):
            await self._data.write(received)
            self._chunks += 1
        await self._data.end()

    async def linger(self, last: asyncio.Task[None]) -> None:
        """Wait until the task `last`, which copies the remaining direction, has ended, has copied
        nothing for `LINGER_S`, or has run for `LINGER_LIMIT_S`."""
        end_s = asyncio.get_running_loop().time() + LINGER_LIMIT_S
        chunks = -1
        while (
            not last.done() and chunks != self._chunks and asyncio.get_running_loop().time() < end_s
        ):
            chunks = self._chunks
            await asyncio.wait((last,), timeout=LINGER_S)


@dataclass(slots=True)
class _Pair:
    """The data stream and the error stream of one forwarded connection. Forwarding begins when the
    client has opened both; an incomplete pair is reset after `PAIRING_S`."""

    port: int
    expiry: asyncio.TimerHandle
    data: MultiplexedStream | None = None
    error: MultiplexedStream | None = None


class Forwarder:
    """Pairs the streams of a SPDY connection, and forwards each pair in its own task."""

    def __init__(self, backend: Backend, sandbox_id: str, limits: ForwardLimits) -> None:
        self._backend, self._sandbox_id = backend, sandbox_id
        self._limits = ForwardLimits(limits, sandbox_id)
        self._pairs: dict[str, _Pair] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_open(self, stream: MultiplexedStream) -> None:
        """Assign a newly opened stream to its pair, and begin to forward if the pair is complete.
        Reset an invalid stream, and a stream above the limit of pairs."""
        kind, port = stream.header("streamtype"), _port(stream.header("port"))
        if kind not in ("data", "error") or port is None:
            stream.reset(Status.PROTOCOL_ERROR)
            return
        request = stream.header("requestid") or self._implied_request(kind, stream.stream_id)
        pair = self._pairs.get(request)
        if pair is None:
            if len(self._pairs) + len(self._tasks) >= PAIRS_LIMIT:
                stream.reset(Status.REFUSED_STREAM)
                return
            expiry = asyncio.get_running_loop().call_later(PAIRING_S, self._expire, request)
            pair = self._pairs[request] = _Pair(port, expiry)
        if port != pair.port or getattr(pair, kind) is not None:
            stream.reset(Status.PROTOCOL_ERROR)
            return
        setattr(pair, kind, stream)
        self._start_if_complete(request, pair)

    @staticmethod
    def _implied_request(kind: str, stream_id: int) -> str:
        """Return a name for the pair to which a stream without the header `requestid` belongs. A
        client that omits this header opens the error stream first, then the data stream with the
        next stream id. So the name of the pair has the error stream's id."""
        return f"stream {stream_id if kind == 'error' else stream_id - 2}"

    def _start_if_complete(self, request: str, pair: _Pair) -> None:
        if pair.data is None or pair.error is None:
            return
        del self._pairs[request]
        pair.expiry.cancel()
        task = asyncio.create_task(self._run(pair.data, pair.error, pair.port))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, data: MultiplexedStream, error: MultiplexedStream, port: int) -> None:
        error.inbound.discard()
        forwarding = asyncio.create_task(
            forward(self._backend, self._sandbox_id, port, self._limits, data, data.inbound)
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
        """Cancel the forwarding of all pairs and close their connections."""
        for pair in self._pairs.values():
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
    limits: ForwardLimits,
    ports: tuple[int, ...],
    channels: list[tuple[WebSocketChannel, WebSocketChannel]],
) -> None:
    """Forward ports over WebSocket. Each port has a data channel and an error channel; the server
    first writes the port on both (16 bits, little-endian)."""
    for port, pair in zip(ports, channels, strict=True):
        for channel in pair:
            await channel.write(port.to_bytes(2, "little"))
    own = ForwardLimits(limits, sandbox_id)

    async def one(port: int, data: WebSocketChannel, error: WebSocketChannel) -> None:
        error.inbound.discard()
        text = await forward(backend, sandbox_id, port, own, data, data.inbound, half_close=False)
        if text:
            with contextlib.suppress(StreamGone):
                await error.write(text.encode())

    # Not asyncio.gather(), which leaves the others running when one fails.
    async with asyncio.TaskGroup() as group:
        for port, pair in zip(ports, channels, strict=True):
            group.create_task(one(port, *pair))
