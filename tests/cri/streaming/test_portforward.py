"""Tests port forwarding with Go's client, over SPDY and over SPDY in a WebSocket, to TCP servers of
this machine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from cri_server.streaming.backend import PortForwardOptions
from cri_server.streaming.server import StreamingServer

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[int]:
    """Run a TCP server for the `with` block; yield its port."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the digest of all received data once the client has half-closed the connection."""
    writer.write(hashlib.sha256(await reader.read()).hexdigest().encode())
    await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def forwarded(
    goclient: Path, server: StreamingServer, transport: str, *ports: int
) -> AsyncIterator[list[int]]:
    """Run Go's port-forward client; yield its local ports."""
    url = server.url_for(PortForwardOptions("pod", ports))
    arguments = ["forward", "-url", url, "-ports", ",".join(f":{port}" for port in ports)]
    if transport == "tunnel":
        arguments.append("-tunnel")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(goclient, *arguments, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield [int(word) for word in line.split()]
    finally:
        process.stdin.close()
        async with asyncio.timeout(60):
            await process.wait()


async def ask(port: int, data: bytes) -> bytes:
    """Send all data, half-close the connection, and return all that the server sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    try:
        _, answer = await asyncio.gather(send(), reader.read())
    finally:
        writer.close()
    return answer


pytestmark = pytest.mark.parametrize("transport", ["spdy", "tunnel"])


@pytest.mark.requirement("9.11")
async def test_data_and_half_closing_pass_through(
    goclient: Path, server: StreamingServer, transport: str
) -> None:
    data = os.urandom(20 << 20)
    async with (
        service(echo) as one,
        service(digest) as two,
        forwarded(goclient, server, transport, one, two) as (to_echo, to_digest),
        asyncio.timeout(60),
    ):
        assert await ask(to_digest, data) == hashlib.sha256(data).hexdigest().encode()
        assert await ask(to_echo, data) == data


@pytest.mark.requirement("9.11")
async def test_many_connections_are_forwarded_at_once(
    goclient: Path, server: StreamingServer, transport: str
) -> None:
    blocks = [os.urandom(200_000) for _ in range(60)]
    async with service(echo) as port, forwarded(goclient, server, transport, port) as (local,):
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(ask(local, block) for block in blocks))
    assert answers == blocks


async def test_a_closed_port_ends_its_connection(
    goclient: Path, server: StreamingServer, transport: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        closed = taken.getsockname()[1]
        async with forwarded(goclient, server, transport, closed) as (local,), asyncio.timeout(60):
            # Go's client then closes its other connections, too ("lost connection to pod").
            with contextlib.suppress(ConnectionError):
                assert await ask(local, b"anybody?") == b""


async def test_a_client_that_leaves_closes_its_connections(
    goclient: Path, server: StreamingServer, transport: str
) -> None:
    ended = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    async with service(hold) as port:
        async with forwarded(goclient, server, transport, port) as (local,):
            reader, writer = await asyncio.open_connection("127.0.0.1", local)
            assert await reader.readexactly(4) == b"here"
        async with asyncio.timeout(60):
            await ended.wait()
        writer.close()
