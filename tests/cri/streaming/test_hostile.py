"""Tests the streaming server with clients that guess URLs, stall or disconnect: other sessions
continue, and no task or descriptor of those clients is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest

from cri_server.streaming import connection as connection_module
from cri_server.streaming import portforward
from cri_server.streaming import server as server_module
from cri_server.streaming.backend import AttachOptions, ExecSessionOptions, PortForwardOptions
from cri_server.streaming.multiplex import MultiplexedStream
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import KernelError
from tests.cri.streaming.client import address_of, connect
from tests.cri.streaming.conftest import GoExec
from tests.cri.streaming.processes import ProcessBackend
from tests.support.spdy import SpdyClient

SPDY = ("Connection: Upgrade", "Upgrade: SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io")
WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
SHELL = ExecSessionOptions(
    "c", ("/bin/sh", "-c", "echo out; cat"), stdin=True, stdout=True, stderr=True
)


def path_of(url: str) -> str:
    return urlsplit(url).path


def request(path: str, *fields: str, method: str = "POST", host: str = "localhost:10250") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *fields, "", ""]).encode()


@contextlib.asynccontextmanager
async def connection(
    server: StreamingServer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address_of(server))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer(server: StreamingServer, data: bytes) -> tuple[int, bytes]:
    """Send one request; return the status and the whole text of the response."""
    async with connection(server) as (reader, writer), asyncio.timeout(60):
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        rest = b"" if status == 101 else await reader.read()
    return status, head + rest


# ---- tickets and requests ----


async def test_a_url_opens_a_single_session(server: StreamingServer) -> None:
    path = path_of(server.url_for(SHELL))
    assert (await answer(server, request(path, *SPDY)))[0] == 101
    assert (await answer(server, request(path, *SPDY)))[0] == 404


@pytest.mark.requirement("9.1")
async def test_unknown_used_and_expired_tickets_get_the_same_answer(
    backend: ProcessBackend,
) -> None:
    from cri_server.streaming.tokens import Tickets

    server = StreamingServer(backend, tickets=Tickets(ttl_s=0.05))
    await server.start()
    expired = path_of(server.url_for(SHELL))
    await asyncio.sleep(0.1)
    answers = {
        await answer(server, request(path, *SPDY)) for path in (expired, "/exec/" + "x" * 43)
    }
    assert len(answers) == 1 and answers.pop()[0] == 404
    await server.close()


@pytest.mark.parametrize(
    "twist",
    [
        "/attach/{t}",
        "/portforward/{t}",
        "//exec/{t}",
        "/exec//{t}",
        "/exec/{t}/",
        "/EXEC/{t}",
        "/exec/../exec/{t}",
        "/%65xec/{t}",
        "/exec/{t}%00",
        "/",
        "/exec/",
        "*",
    ],
)
async def test_only_the_exact_path_opens_a_session(server: StreamingServer, twist: str) -> None:
    token = path_of(server.url_for(SHELL)).removeprefix("/exec/")
    status, _ = await answer(server, request(twist.format(t=token), *SPDY))
    assert status in (400, 404)
    assert (await answer(server, request(f"/exec/{token}", *SPDY)))[0] == 101


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(request("/exec/T", *SPDY, method="PUT"), 405, id="PUT"),
        pytest.param(request("/exec/T", *SPDY, method="CONNECT"), 405, id="CONNECT"),
        pytest.param(request("/exec/T", *SPDY, "Content-Length: 4") + b"body", 400, id="body"),
        pytest.param(request("/exec/T", *SPDY, "X: " + "y" * 100_000), 431, id="header bomb"),
        pytest.param(request("/exec/T"), 400, id="no upgrade"),
        pytest.param(
            request("/exec/T", "Connection: Upgrade", "Upgrade: h2c"), 400, id="another upgrade"
        ),
        pytest.param(request("/exec/T", *SPDY[:2]), 400, id="no stream protocol"),
        pytest.param(
            request("/exec/T", *SPDY[:2], "X-Stream-Protocol-Version: v5.channel.k8s.io"),
            403,
            id="unknown protocol",
        ),
        pytest.param(request("/exec/T", *WEBSOCKET), 400, id="WebSocket by POST"),
        pytest.param(
            request("/exec/T", *WEBSOCKET, "Sec-WebSocket-Protocol: chat", method="GET"),
            403,
            id="unknown subprotocol",
        ),
        pytest.param(b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", 400, id="TLS"),
    ],
)
async def test_invalid_requests_are_refused(
    server: StreamingServer, data: bytes, status: int
) -> None:
    path = path_of(server.url_for(SHELL)).encode()
    got, _ = await answer(server, data.replace(b"/exec/T", path))
    assert got == status


async def test_any_host_header_is_accepted(server: StreamingServer) -> None:
    # The Host header comes from kubelet's client and does not name this server. The server checks
    # the token instead.
    for host in ("10.1.2.3:10250", "node.example", "[::1]:10250"):
        path = path_of(server.url_for(SHELL))
        assert (await answer(server, request(path, *SPDY, host=host)))[0] == 101


async def test_unused_urls_are_limited(server: StreamingServer) -> None:
    from pyrunc.errors import ResourceExhausted

    for _ in range(500):
        server.url_for(AttachOptions("c", stdout=True))
        server.url_for(PortForwardOptions("c"))
    with pytest.raises(ResourceExhausted):
        server.url_for(SHELL)


@pytest.mark.requirement("9.1")
async def test_the_server_listens_on_loopback_only(server: StreamingServer) -> None:
    host, port = address_of(server)
    assert host == "127.0.0.1"
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # taken if the server listened on every address


# ---- stalling ----


async def test_a_slow_request_is_ended(
    server: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "REQUEST_S", 0.4)
    loop = asyncio.get_running_loop()
    with socket.create_connection(address_of(server)) as client:
        client.setblocking(False)
        # A byte may meet the closed end; what was answered is still read.
        with contextlib.suppress(ConnectionError):
            for byte in request("/exec/x", *SPDY):
                await loop.sock_sendall(client, bytes((byte,)))
                await asyncio.sleep(0.02)
        assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /", request("/exec/none", *SPDY)], ids=["silent", "half", "refused"]
)
async def test_connections_without_a_ticket_do_not_block_sessions(
    server: StreamingServer, go: GoExec, sent: bytes
) -> None:
    """Any user of the machine can connect. When too many connections have sent no valid URL, the
    server closes the oldest of them."""
    limit = server_module.UNOPENED_LIMIT
    async with contextlib.AsyncExitStack() as stack:
        idle = []
        for _ in range(limit + 20):
            reader, writer = await stack.enter_async_context(connection(server))
            writer.write(sent)
            idle.append(reader)
        assert (await go("echo still here")).stdout == b"still here\n"
        async with asyncio.timeout(60):
            for reader in idle[:20]:
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
        assert len(server._connections) <= limit


async def test_a_flood_of_connections_does_not_overtake_a_client_with_a_ticket(
    server: StreamingServer, go: GoExec
) -> None:
    stop, connections = asyncio.Event(), 0

    async def flood() -> None:
        nonlocal connections
        writers: deque[asyncio.StreamWriter] = deque()
        while not stop.is_set():
            _, writer = await asyncio.open_connection(*address_of(server))
            connections += 1
            writers.append(writer)
            if len(writers) > server_module.UNOPENED_LIMIT:
                writers.popleft().transport.abort()
        for writer in writers:
            writer.transport.abort()

    flooding = [asyncio.create_task(flood()) for _ in range(4)]
    try:
        number = 0
        # however slow the machine, it is a flood
        while number < 5 or connections <= server_module.UNOPENED_LIMIT:
            assert (await go(f"echo {number}")).stdout == b"%d\n" % number
            number += 1
    finally:
        stop.set()
        await asyncio.gather(*flooding)


# ---- port-forward storms ----


class SlowPods(ProcessBackend):
    """A backend that connects to ports of pods only when `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.dialing = self.most = self.dialed = 0
        self.pods: list[socket.socket] = []

    async def dial(self, sandbox_id: str, port: int) -> socket.socket:
        self.dialing += 1
        self.most = max(self.most, self.dialing)
        try:
            await self.open.wait()
        finally:
            self.dialing -= 1
        ours, pod = socket.socketpair()
        self.dialed += 1
        self.pods.append(pod)
        return ours


async def forward_many(
    server: StreamingServer, stack: contextlib.AsyncExitStack, count: int, pod: str = "pod"
) -> list[MultiplexedStream]:
    """Open a port-forward session with `count` connections into `pod`; return their error
    streams."""
    url = server.url_for(PortForwardOptions(pod))
    multiplexer = await stack.enter_async_context(connect(url, "portforward.k8s.io"))
    errors = []
    for number in range(count):
        headers = {"port": ["80"], "requestid": [str(number)]}
        errors.append(await multiplexer.open({"streamtype": ["error"], **headers}))
        await multiplexer.open({"streamtype": ["data"], **headers})
    return errors


async def status_of(error: MultiplexedStream) -> bytes:
    async with asyncio.timeout(60):
        return await error.inbound.read()


async def test_dials_and_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portforward, "DIALS_LIMIT", 20)
    backend = SlowPods()
    server = StreamingServer(backend)
    await server.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            errors = await forward_many(server, stack, portforward.SESSION_LIMIT + 10)
            assert backend.dialing == portforward.SESSION_DIALS_LIMIT
            for error in errors[portforward.SESSION_LIMIT :]:
                assert b"the limit of 256 forwarded connections of this session" in await status_of(
                    error
                )
            others = [await forward_many(server, stack, 20, f"pod {n}") for n in range(4)]
            assert backend.dialing == backend.most == portforward.DIALS_LIMIT
            backend.open.set()
            async with asyncio.timeout(60):
                while backend.dialed < portforward.SESSION_LIMIT + 80:
                    await asyncio.sleep(0.01)
            server.handler.forward_limits.limit = len(server.handler.forward_limits._open)
            (refused,) = await forward_many(server, stack, 1)
            assert b"forwarded connections of this node is reached" in await status_of(refused)
            assert not any(error.gone.is_set() for session in others for error in session)
        async with asyncio.timeout(60):
            while server.handler.forward_limits._open:
                await asyncio.sleep(0.01)
    finally:
        await server.close()
        for pod in backend.pods:
            pod.close()


class ClosedPorts(SlowPods):
    """A backend whose pods refuse connections to port 1 once `open` is set; other ports accept
    connections and never answer."""

    async def dial(self, sandbox_id: str, port: int) -> socket.socket:
        if port == 1:
            self.dialed += 1
            await self.open.wait()
            raise KernelError("connect", "127.0.0.1:1", errno.ECONNREFUSED)
        ours, pod = socket.socketpair()
        self.pods.append(pod)
        return ours


async def test_a_client_that_resets_while_a_port_is_refused_leaves_no_connection() -> None:
    """When a client that forwards two ports over one WebSocket resets it while the pod refuses one
    port, the server closes the connection to the other port, too."""
    backend = ClosedPorts()
    server = StreamingServer(backend)
    await server.start()
    try:
        url = server.url_for(PortForwardOptions("pod", (80, 1)))
        async with connection(server) as (reader, writer):
            writer.write(request(path_of(url), *WEBSOCKET, method="GET"))
            async with asyncio.timeout(10):
                await reader.readuntil(b"\r\n\r\n")
                while not (backend.dialed and backend.pods):
                    await asyncio.sleep(0.01)
            client: socket.socket = writer.get_extra_info("socket")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            asyncio.get_running_loop().call_soon(backend.open.set)  # after the transport has closed
        async with asyncio.timeout(10):
            while server.handler.forward_limits._open:
                await asyncio.sleep(0.01)
        (pod,) = backend.pods
        assert pod.recv(1) == b""
    finally:
        await server.close()
        for pod in backend.pods:
            pod.close()


async def test_sessions_into_the_same_pod_share_its_dials() -> None:
    """A pod whose backlog is full may use only a part of the server's concurrent connection
    attempts; the rest are for other pods."""
    backend = SlowPods()
    server = StreamingServer(backend)
    await server.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                await forward_many(server, stack, portforward.SESSION_DIALS_LIMIT)
            assert backend.dialing == portforward.POD_DIALS_LIMIT < portforward.DIALS_LIMIT
            await forward_many(server, stack, 1, "another")
            assert backend.dialing == portforward.POD_DIALS_LIMIT + 1
    finally:
        await server.close()


async def test_a_turn_to_dial_goes_to_the_pod_with_the_fewest_dials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portforward, "DIALS_LIMIT", 4)
    dials, order = portforward.Dials(), list[str]()
    ends = {name: asyncio.Event() for name in ("full 1", "full 2", "other", "third")}

    async def dial(pod: str) -> None:
        async with dials.turn(pod):
            order.append(pod)
            await ends[pod].wait()

    tasks = [asyncio.create_task(dial(pod)) for pod in ("full 1", "full 2") * 10]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(dial(pod)) for pod in ("other", "other", "third")]
    await asyncio.sleep(0)
    assert sorted(order) == ["full 1", "full 1", "full 2", "full 2"]
    tasks[-2].cancel()  # while it waits
    tasks[0].cancel()  # in its turn
    await asyncio.wait([tasks[0], tasks[-2]])
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    await asyncio.sleep(0)
    assert order[4:] == ["other", "third"]  # before 16 that have waited longer
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(order) == len(tasks) - 1
    assert not dials._waiting and not dials._running


async def test_a_dial_that_waits_too_long_fails_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portforward, "DIAL_WAIT_S", 0.2)
    backend = SlowPods()
    server = StreamingServer(backend)
    await server.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            errors = await forward_many(server, stack, portforward.SESSION_DIALS_LIMIT + 1)
            assert b"port 80: too many connections are being opened" in await status_of(errors[-1])
    finally:
        await server.close()


async def test_more_ports_than_channels_are_refused(server: StreamingServer) -> None:
    for count, status in ((127, 101), (128, 400)):
        url = server.url_for(PortForwardOptions("pod", tuple(range(1, count + 1))))
        got, text = await answer(server, request(path_of(url), *WEBSOCKET, method="GET"))
        assert got == status
    assert b"128 ports" in text


async def test_guessing_does_not_disturb_a_session(server: StreamingServer, go: GoExec) -> None:
    stop, guesses = asyncio.Event(), 0

    async def guess() -> None:
        nonlocal guesses
        while not stop.is_set():
            status, _ = await answer(server, request(f"/exec/{os.urandom(6).hex()}", *SPDY))
            assert status == 404
            guesses += 1

    guessing = [asyncio.create_task(guess()) for _ in range(8)]
    process = await go.start("echo x; read line; exit 3", stdin=True)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"x\n"
        while guesses <= 20:
            await asyncio.sleep(0.01)
        await process.communicate(b"\n")
    assert process.returncode == 3
    stop.set()
    await asyncio.gather(*guessing)


@pytest.mark.requirement("9.4")
async def test_a_session_whose_streams_are_not_opened_ends(
    server: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "STREAMS_S", 0.3)
    client = SpdyClient()
    client.open({"streamtype": ["error"]})
    async with connection(server) as (reader, writer), asyncio.timeout(60):
        writer.write(request(path_of(server.url_for(SHELL)), *SPDY) + client.data_to_send())
        await reader.read()


@pytest.mark.parametrize("role", ["stdin", "nonsense", "", "error"])
async def test_unrequested_streams_are_reset(server: StreamingServer, role: str) -> None:
    client = SpdyClient()
    client.open({"streamtype": ["error"]})
    extra = client.open({"streamtype": [role]})
    options = ExecSessionOptions("c", ("/bin/sh",), stdout=True)
    async with connection(server) as (reader, writer), asyncio.timeout(60):
        writer.write(request(path_of(server.url_for(options)), *SPDY) + client.data_to_send())
        await reader.readuntil(b"\r\n\r\n")
        events: list[str] = []
        while "StreamReset" not in events:
            events += [type(e).__name__ for e in client.receive(await reader.read(4096))]
        assert not client.is_open(extra)


# ---- clients that vanish ----


def exec_bytes(server: StreamingServer, rng: random.Random) -> bytes:
    client = SpdyClient()
    for role in ("error", "stdin", "stdout", "stderr"):
        client.open({"streamtype": [role]})
    data = rng.randbytes(rng.randrange(100_000))
    opening = client.data_to_send()
    body = client.data_head(3, len(data)) + data + client.data_head(3, 0, fin=rng.random() < 0.5)
    return request(path_of(server.url_for(SHELL)), *SPDY) + opening + body


def websocket_bytes(server: StreamingServer, rng: random.Random) -> bytes:
    fields = (*WEBSOCKET, "Sec-WebSocket-Protocol: v5.channel.k8s.io")
    data = b"\0" + rng.randbytes(rng.randrange(60_000))
    frame = b"\x82\xfe" + len(data).to_bytes(2, "big") + bytes(4) + data
    return request(path_of(server.url_for(SHELL)), *fields, method="GET") + frame * rng.randrange(4)


def forward_bytes(server: StreamingServer, rng: random.Random, port: int) -> bytes:
    client, sent = SpdyClient(), b""
    for number in range(rng.randrange(1, 5)):
        for role in ("error", "data"):
            stream = client.open(
                {"streamtype": [role], "port": [str(port)], "requestid": [str(number)]}
            )
        data = rng.randbytes(rng.randrange(50_000))
        sent += client.data_to_send() + client.data_head(stream, len(data)) + data
    fields = (*SPDY[:2], "X-Stream-Protocol-Version: portforward.k8s.io")
    return request(path_of(server.url_for(PortForwardOptions("pod"))), *fields) + sent


async def cut(server: StreamingServer, sent: bytes, rng: random.Random) -> None:
    """Send a random part of `sent` and disconnect: with a FIN, with a reset, or after reading some
    bytes."""
    reader, writer = await asyncio.open_connection(*address_of(server))
    writer.write(sent[: rng.randrange(len(sent) + 1)])
    end = rng.randrange(3)
    if end == 0:
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )
    elif end == 1:
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.random() / 50):
                await reader.read(rng.randrange(1, 1000))
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def cut_sessions(server: StreamingServer, backend: ProcessBackend, count: int) -> None:
    rng = random.Random(20)
    tasks = len(asyncio.all_tasks())
    fds = len(os.listdir("/proc/self/fd"))

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as service:
        port = service.sockets[0].getsockname()[1]
        for _ in range(0, count, 10):
            makers: list[Callable[[], bytes]] = [
                lambda: exec_bytes(server, rng),
                lambda: websocket_bytes(server, rng),
                lambda: forward_bytes(server, rng, port),
            ]
            sent = [make() for make in rng.choices(makers, k=10)]
            await asyncio.gather(*(cut(server, data, rng) for data in sent))
            server._tickets._tickets.clear()  # those whose request was cut off
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) > tasks or len(os.listdir("/proc/self/fd")) > fds:
            await asyncio.sleep(0.05)
    assert all(session.closed.is_set() for session in backend.sessions)
    backend.sessions.clear()


async def test_sessions_may_be_cut_at_any_byte(
    server: StreamingServer, backend: ProcessBackend, go: GoExec, caplog: pytest.LogCaptureFixture
) -> None:
    await go("true")  # opens what stays open: the watcher of children
    with caplog.at_level(logging.WARNING):
        await cut_sessions(server, backend, 300)
    assert not [record for record in caplog.records if record.name.startswith("cri_server")]
    assert (await go("echo well")).stdout == b"well\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_ten_thousand_sessions_may_be_cut_at_any_byte(
    server: StreamingServer, backend: ProcessBackend, go: GoExec
) -> None:
    await go("true")
    await cut_sessions(server, backend, 10_000)


async def test_other_sessions_continue_meanwhile(server: StreamingServer, go: GoExec) -> None:
    rng = random.Random(21)
    running = asyncio.create_task(go("for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.1; done"))
    while not running.done():
        nonsense = request(path_of(server.url_for(SHELL)), *SPDY) + rng.randbytes(
            rng.randrange(1, 5000)
        )
        await cut(server, nonsense, rng)
    assert (await running).stdout == b"1\n2\n3\n4\n5\n6\n7\n8\n"
