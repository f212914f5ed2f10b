"""Tests that a thousand sessions leave no task or open file, and how forwarded connections end. The
client and the server both run the product's protocol code."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from cri_server.streaming.backend import AttachOptions, ExecSessionOptions, PortForwardOptions
from cri_server.streaming.multiplex import MultiplexedStream
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.streams import StreamGone
from pyrunc.errors import PeerError
from tests.cri.streaming import client
from tests.cri.streaming.client import Terminal, address_of
from tests.cri.streaming.processes import ProcessBackend
from tests.support.spdy import ClientMultiplexer


async def once(server: StreamingServer, command: str, *pieces: bytes) -> tuple[int, bytes]:
    """Run a shell command with `pieces` as its stdin; return its exit code and stdout."""

    async def stdin() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file:
        try:
            url = server.url_for(
                ExecSessionOptions("c", ("/bin/sh", "-c", command), stdin=True, stdout=True)
            )
            code = await client.run(url, Terminal(stdin=stdin(), stdout_fd=writing))
        finally:
            os.close(writing)
        return code, file.read()


async def test_a_thousand_sessions_leave_nothing(
    server: StreamingServer, backend: ProcessBackend
) -> None:
    tasks, before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    for start in range(0, 1000, 20):
        outcomes = await asyncio.gather(
            *(
                once(server, f"cat; exit {n % 200}", b"%d" % n, b".")
                for n in range(start, start + 20)
            )
        )
        assert outcomes == [(n % 200, b"%d." % n) for n in range(start, start + 20)]
    async with asyncio.timeout(30):
        while len(asyncio.all_tasks()) > tasks or len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.02)


async def test_failures_are_reported_to_the_client(server: StreamingServer) -> None:
    with pytest.raises(PeerError, match="container missing"):
        await client.run(
            server.url_for(AttachOptions("missing", stdout=True)), Terminal(stdout_fd=1)
        )
    with pytest.raises(PeerError, match="no such session"):
        await client.run(
            "http://{}:{}/exec/guess".format(*address_of(server)), Terminal(stdout_fd=1)
        )


async def test_a_closed_server_ends_its_sessions(
    server: StreamingServer, backend: ProcessBackend
) -> None:
    running = asyncio.create_task(once(server, "sleep 60"))
    async with asyncio.timeout(30):
        while not backend.sessions:
            await asyncio.sleep(0.01)
        await server.close()
        with pytest.raises(PeerError, match="lost"):
            await running
        await backend.sessions[0].closed.wait()


# ---- port forwarding, stream by stream ----


@contextlib.asynccontextmanager
async def forwarding(server: StreamingServer) -> AsyncIterator[ClientMultiplexer]:
    url = server.url_for(PortForwardOptions("pod"))
    async with client.connect(url, "portforward.k8s.io") as multiplexer, asyncio.timeout(60):
        yield multiplexer


def headers(role: str, port: object, request: str = "") -> dict[str, list[str]]:
    return {"streamtype": [role], "port": [str(port)]} | (
        {"requestid": [request]} if request else {}
    )


@pytest.mark.requirement("9.11")
async def test_a_refused_connection_is_reported_on_the_error_stream(
    server: StreamingServer,
) -> None:
    """After the refusal, the session forwards a connection to another port."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with (
        await asyncio.start_server(greet, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        error = await multiplexer.open(headers("error", 1, "a"))
        data = await multiplexer.open(headers("data", 1, "a"))
        assert b"port 1: connect 127.0.0.1:1: ECONNREFUSED" in await error.inbound.read()
        assert await error.inbound.read() == b""
        with pytest.raises(StreamGone):
            await data.inbound.read()
        port = service.sockets[0].getsockname()[1]
        await multiplexer.open(headers("error", port, "b"))
        data = await multiplexer.open(headers("data", port, "b"))
        assert await data.inbound.read() == b"hello"


@pytest.mark.requirement("9.11")
@pytest.mark.parametrize("request_id", ["", "same"])
async def test_streams_are_paired_with_and_without_request_ids(
    server: StreamingServer, request_id: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.read())
        writer.close()

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        port = service.sockets[0].getsockname()[1]
        for _ in range(2):  # an id may come again when its pair is complete
            error = await multiplexer.open(headers("error", port, request_id))
            data = await multiplexer.open(headers("data", port, request_id))
            await data.write(b"this")
            await data.end()
            assert await data.inbound.read() == b"got this"
            assert await data.inbound.read() == b""
            assert await error.inbound.read() == b""


@pytest.mark.parametrize(
    "wrong",
    [
        headers("stdin", 80, "x"),
        headers("data", 0, "x"),
        headers("data", 65536, "x"),
        headers("data", "-1", "x"),
        headers("data", "٣", "x"),
        headers("data", "", "x"),
        {"port": ["80"]},
        {},
    ],
)
async def test_streams_with_invalid_headers_are_reset(
    server: StreamingServer, wrong: dict[str, list[str]]
) -> None:
    async with forwarding(server) as multiplexer:
        with pytest.raises(StreamGone):
            await (await multiplexer.open(wrong)).inbound.read()


async def test_a_pair_does_not_change_its_port(server: StreamingServer) -> None:
    async with forwarding(server) as multiplexer:
        await multiplexer.open(headers("error", 80, "x"))
        with pytest.raises(StreamGone):
            await (await multiplexer.open(headers("data", 81, "x"))).inbound.read()


async def test_an_incomplete_pair_is_reset(
    server: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cri_server.streaming.portforward.PAIRING_S", 0.1)
    async with forwarding(server) as multiplexer:
        stream = await multiplexer.open(headers("error", 80, "x"))
        await stream.gone.wait()


# ---- who ends first: clients by what they do with the streams of a connection ----


@dataclass(frozen=True)
class ForwardClient:
    """How a port-forward client behaves after the server in the pod has closed the forwarded
    connection.

    `awaits_error`: the client closes the local connection, and so ends its direction of the data
    stream, only when the error stream has ended.
    """

    awaits_error: bool = False
    resets_data: bool = False
    ends_data: bool = False
    ends_error_at_once: bool = True


CLIENTS = {
    # client-go's tools/portforward up to 0.31, which many programs are made of; Lens and others run
    # a kubectl.
    "kubectl up to 1.31": ForwardClient(awaits_error=True, ends_data=True),
    # From 0.32 on it resets the data stream before it waits for the error stream.
    "kubectl from 1.32": ForwardClient(awaits_error=True, resets_data=True),
    # Teleport's proxy for Kubernetes copies each stream on its own.
    "a proxy that copies both directions": ForwardClient(ends_data=True),
    # One that forgets its streams without a word: they take a place in the session's table.
    "one that ends nothing": ForwardClient(ends_error_at_once=False),
}
# Clients over WebSocket without a tunnel (Python's, fabric8's, JavaScript's, kr8s) cannot end a
# direction; the pod's end is the session's: tests/cri/streaming/test_websocket_forms.py.
of_each_client = pytest.mark.parametrize("client_name", CLIENTS)


async def pair(
    multiplexer: ClientMultiplexer, port: int, client_name: str, number: int = 0
) -> tuple[MultiplexedStream, MultiplexedStream]:
    """Open the error stream and the data stream of a forwarded connection as the named client does;
    return (data, error)."""
    error = await multiplexer.open(headers("error", port, str(number)))
    if CLIENTS[client_name].ends_error_at_once:
        await error.end()
    return await multiplexer.open(headers("data", port, str(number))), error


async def close_after_pod(
    client_name: str, data: MultiplexedStream, error: MultiplexedStream
) -> bytes:
    """Read the pod's data to the end, then end the streams as the named client does; return the
    data."""
    received = b""
    while piece := await data.inbound.read():
        received += piece
    how = CLIENTS[client_name]
    if how.resets_data:
        data.reset()
    if how.awaits_error:
        assert await error.inbound.read() == b""
    if how.ends_data:
        await data.end()
    return received


class HalfOpen:
    """A server that sends a greeting and half-closes the connection, then waits until the peer has
    closed it, too."""

    def __init__(self) -> None:
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(b"hello")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.connections -= 1
        writer.close()


@pytest.mark.requirement("9.11")
@of_each_client
async def test_a_connection_that_the_pod_half_closes_ends(
    server: StreamingServer, client_name: str
) -> None:
    pod = HalfOpen()
    async with (
        await asyncio.start_server(pod, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        data, error = await pair(multiplexer, service.sockets[0].getsockname()[1], client_name)
        assert await close_after_pod(client_name, data, error) == b"hello"
        assert await error.inbound.read() == b""
        await until(lambda: not pod.connections and not server.handler.forward_limits._open)


@pytest.mark.requirement("9.11")
@of_each_client
async def test_many_half_closed_connections_leave_room_for_more(
    server: StreamingServer, client_name: str
) -> None:
    pod = HalfOpen()
    async with (
        await asyncio.start_server(pod, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        port = service.sockets[0].getsockname()[1]
        # 300 connections exceed SESSION_LIMIT, and 600 the session's table of streams.
        rounds = 1 if CLIENTS[client_name].ends_error_at_once else 2
        for start in range(0, 300 * rounds, 300):
            if start:  # the table has 512 places, and each lingers for a second
                await until(lambda: not server.handler.forward_limits._open)
            pairs = [await pair(multiplexer, port, client_name, start + n) for n in range(300)]
            ends = (close_after_pod(client_name, *streams) for streams in pairs)
            assert set(await asyncio.gather(*ends)) == {b"hello"}
        assert (
            await close_after_pod(client_name, *await pair(multiplexer, port, client_name, 600))
            == b"hello"
        )


@pytest.mark.requirement("9.11")
async def test_a_connection_that_the_client_half_closes_ends(server: StreamingServer) -> None:
    """The connection ends although the server in the pod does not close it."""
    stopped = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await stopped.wait()
        writer.close()

    async with (
        await asyncio.start_server(silent, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        port = service.sockets[0].getsockname()[1]
        try:
            pairs = []
            for number in range(301):
                data, error = await pair(multiplexer, port, "kubectl up to 1.31", number)
                # kubectl sends the same frame when its local client has disconnected.
                await data.end()
                pairs.append((data, error))
            for data, error in pairs:
                assert await data.inbound.read() == b""
                assert await error.inbound.read() == b""
            await until(lambda: not server.handler.forward_limits._open)
        finally:
            stopped.set()


async def test_an_answer_to_a_half_closed_client_may_take_longer_than_a_second(
    server: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits as long as bytes arrive; containerd truncates the answer after one
    second."""
    monkeypatch.setattr("cri_server.streaming.portforward.LINGER_S", 0.5)
    pieces = 12

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        for _ in range(pieces):
            await asyncio.sleep(0.1)
            writer.write(b"x")
        writer.close()

    async with (
        await asyncio.start_server(slow, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        data, _ = await pair(multiplexer, service.sockets[0].getsockname()[1], "kubectl up to 1.31")
        await data.end()
        received = b""
        while piece := await data.inbound.read():
            received += piece
        assert received == b"x" * pieces


async def test_endless_data_for_a_client_that_has_left_is_cut_off(
    server: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the local client of `kubectl port-forward` has disconnected, the server does not forward
    a pod's data for ever."""
    monkeypatch.setattr("cri_server.streaming.portforward.LINGER_LIMIT_S", 0.3)
    monkeypatch.setattr("cri_server.streaming.portforward.LINGER_S", 0.1)
    cut_off = asyncio.Event()

    async def events(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"event")
                await writer.drain()
                await asyncio.sleep(0.01)
        cut_off.set()
        writer.close()

    async with (
        await asyncio.start_server(events, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        data, error = await pair(
            multiplexer, service.sockets[0].getsockname()[1], "kubectl up to 1.31"
        )
        await data.inbound.read()
        await data.end()
        # kubectl up to 1.31 reads no other stream until the data end.
        assert await error.inbound.read() == b""
        await cut_off.wait()


async def until(fact: Callable[[], bool]) -> None:
    """Wait until `fact()` is true or the test times out."""
    while not fact():
        await asyncio.sleep(0.01)


async def test_a_stalled_connection_ends_when_its_stream_is_reset(server: StreamingServer) -> None:
    closed = asyncio.Event()

    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()
        closed.set()

    async with (
        await asyncio.start_server(never_reads, "127.0.0.1", 0) as service,
        forwarding(server) as multiplexer,
    ):
        port = service.sockets[0].getsockname()[1]
        await multiplexer.open(headers("error", port, "x"))
        data = await multiplexer.open(headers("data", port, "x"))
        await data.write(bytes(200_000))
        data.reset()
        await closed.wait()
