"""Many sessions by our own client: the core at both ends of a connection, and nothing that adds up."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from cri_server.streaming.backend import AttachOptions, ExecOptions, PortForwardOptions
from cri_server.streaming.multiplex import Multiplexer
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.streams import StreamGone
from pyrunc.errors import PeerError
from tests.cri.streaming import client
from tests.cri.streaming.client import Terminal
from tests.cri.streaming.processes import ProcessBackend


async def once(server: StreamingServer, command: str, *pieces: bytes) -> tuple[int, bytes]:
    """Exit code and output of a command with these pieces as stdin."""

    async def stdin() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file:
        try:
            url = server.url_for_exec(ExecOptions("c", ("/bin/sh", "-c", command), stdin=True, stdout=True))
            code = await client.run(url, Terminal(stdin=stdin(), stdout_fd=writing))
        finally:
            os.close(writing)
        return code, file.read()


async def test_a_thousand_sessions(server: StreamingServer, backend: ProcessBackend) -> None:
    tasks, before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    for start in range(0, 1000, 20):
        outcomes = await asyncio.gather(
            *(once(server, f"cat; exit {n % 200}", b"%d" % n, b".") for n in range(start, start + 20))
        )
        assert outcomes == [(n % 200, b"%d." % n) for n in range(start, start + 20)]
    async with asyncio.timeout(30):
        while len(asyncio.all_tasks()) > tasks or len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.02)


async def test_failures_are_told(server: StreamingServer) -> None:
    with pytest.raises(PeerError, match="container nobody"):
        await client.run(server.url_for_attach(AttachOptions("nobody", stdout=True)), Terminal(stdout_fd=1))
    with pytest.raises(PeerError, match="no such session"):
        await client.run("http://{}:{}/exec/guess".format(*server.address), Terminal(stdout_fd=1))


async def test_a_server_that_goes_away_ends_its_sessions(
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
async def forwarding(server: StreamingServer) -> AsyncIterator[Multiplexer]:
    url = server.url_for_port_forward(PortForwardOptions("pod"))
    async with client.connect(url, "portforward.k8s.io") as multiplexer, asyncio.timeout(60):
        yield multiplexer


def headers(role: str, port: object, request: str = "") -> dict[str, list[str]]:
    return {"streamtype": [role], "port": [str(port)]} | ({"requestid": [request]} if request else {})


@pytest.mark.requirement("9.11")
async def test_a_refused_connection_is_told_on_the_error_stream(server: StreamingServer) -> None:
    """And ends alone: the session takes others."""

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
async def test_pairs_with_and_without_request_ids(server: StreamingServer, request_id: str) -> None:
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
    [headers("stdin", 80, "x"), headers("data", 0, "x"), headers("data", 65536, "x"), headers("data", "-1", "x"),
     headers("data", "٣", "x"), headers("data", "", "x"), {"port": ["80"]}, {}],
)  # fmt: skip
async def test_streams_that_make_no_sense_are_reset(
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


async def test_half_a_pair_is_given_up(server: StreamingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cri_server.streaming.portforward.PAIRING_S", 0.1)
    async with forwarding(server) as multiplexer:
        stream = await multiplexer.open(headers("error", 80, "x"))
        await stream.gone.wait()


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
