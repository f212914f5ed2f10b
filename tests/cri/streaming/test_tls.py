"""Tests the streaming server with TLS: sessions, certificates, and clients without TLS."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedOK

from cri_server.streaming.backend import ExecSessionOptions
from cri_server.streaming.descriptors import readable
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.tls import Tls, terminated
from tests.cri.streaming.client import address_of
from tests.cri.streaming.processes import ProcessBackend
from tests.cri.streaming.test_websocket_forms import SHELL, receive_all
from tests.support.authority import Authority

SUBPROTOCOL = "v4.channel.k8s.io"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    authority.make()
    authority.sign("server", "/CN=server")
    authority.sign("client", "/CN=client")
    return authority


@pytest.fixture
async def listening(
    authority: Authority, backend: ProcessBackend
) -> AsyncIterator[StreamingServer]:
    """Provide a server that listens with TLS; assert after the test that no task or session is
    left."""
    before = asyncio.all_tasks()
    folder = authority.folder
    server = StreamingServer(
        backend, tls=Tls(f"{folder}/server.crt", f"{folder}/server.key", f"{folder}/ca.crt")
    )
    await server.start()
    yield server
    await server.close()
    async with asyncio.timeout(30):
        for session in backend.sessions:
            await session.closed.wait()
        while asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.sleep(0.01)


def trusting(authority: Authority, client: str = "client") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.crt"))
    if client:
        context.load_cert_chain(
            authority.folder / f"{client}.crt", authority.folder / f"{client}.key"
        )
    return context


def session(
    server: StreamingServer, options: ExecSessionOptions, context: ssl.SSLContext
) -> connect:
    url = server.url_for(options)
    assert url.startswith("https://127.0.0.1:")
    return connect(
        url.replace("http", "ws", 1), ssl=context, proxy=None, compression=None, max_size=None,
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
    )  # fmt: skip


async def test_a_session_works_over_tls(listening: StreamingServer, authority: Authority) -> None:
    async with session(listening, SHELL, trusting(authority)) as client, asyncio.timeout(20):
        assert await client.recv() == b"\x01"
        await client.send(b"\x00this\n")
        output, status = await receive_all(client)
        assert output == b"\x01got this\n" and b'"7"' in status


async def test_much_output_arrives_over_tls(
    listening: StreamingServer, authority: Authority, tmp_path: Path
) -> None:
    data = os.urandom(8 << 20)
    (tmp_path / "data").write_bytes(data)
    options = ExecSessionOptions("c", ("/bin/cat", str(tmp_path / "data")), stdout=True)
    digest = hashlib.sha256()
    async with session(listening, options, trusting(authority)) as client, asyncio.timeout(60):
        with pytest.raises(ConnectionClosedOK):
            while True:
                message = await client.recv()
                assert isinstance(message, bytes)
                digest.update(message[1:] if message[:1] == b"\x01" else b"")
    assert digest.digest() == hashlib.sha256(data).digest()


async def test_a_client_that_leaves_ends_its_session(
    listening: StreamingServer, authority: Authority, backend: ProcessBackend
) -> None:
    options = ExecSessionOptions("c", ("/bin/sleep", "600"), stdin=True, stdout=True)
    async with session(listening, options, trusting(authority)) as client:
        await client.recv()
        client.transport.abort()
    async with asyncio.timeout(20):
        await backend.sessions[0].closed.wait()


async def test_a_client_without_a_certificate_is_refused(
    listening: StreamingServer, authority: Authority, backend: ProcessBackend
) -> None:
    async with asyncio.timeout(20):
        with pytest.raises((OSError, EOFError, Exception)):
            async with session(listening, SHELL, trusting(authority, "")) as client:
                await client.recv()
    assert not backend.sessions


async def test_a_connection_with_unread_input_is_closed(authority: Authority) -> None:
    folder = authority.folder
    tls = Tls(f"{folder}/server.crt", f"{folder}/server.key", f"{folder}/ca.crt")
    ours, theirs = socket.socketpair()
    opening = asyncio.create_task(
        asyncio.open_connection(sock=theirs, ssl=trusting(authority), server_hostname="127.0.0.1")
    )
    async with asyncio.timeout(20):
        async with terminated(ours, tls, 10) as plain:
            reader, writer = await opening
            writer.write(b"never read")
            await readable(plain.fileno())
        assert await reader.read() == b""
    writer.close()


async def test_connections_without_tls_are_refused(listening: StreamingServer) -> None:
    host, port = address_of(listening)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /exec/x HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(20):
        assert b"404" not in await reader.read()
    writer.close()


async def test_a_certificate_that_is_renewed_is_used(authority: Authority, tmp_path: Path) -> None:
    pair = [tmp_path / "server.crt", tmp_path / "server.key"]
    for path in pair:
        shutil.copy(authority.folder / path.name, path)
    tls = Tls(str(pair[0]), str(pair[1]))
    first = tls.context()
    assert tls.context() is first
    authority.sign("other", "/CN=other")
    for path in pair:
        shutil.copy(authority.folder / f"other{path.suffix}", path)
        os.utime(path, ns=(1, 1))
    second = tls.context()
    assert second is not first
    pair[1].write_text("no key")
    assert tls.context() is second
