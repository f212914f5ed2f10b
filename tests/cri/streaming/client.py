"""A SPDY client built from the product's protocol code. It is faster than a Go process for each
session, and can send what Go's client never sends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from cri_server.streaming.descriptors import write_all
from cri_server.streaming.multiplex import MultiplexedStream
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.streams import Inbound, Outbound, StreamGone
from cri_server.streaming.transport import ConnectionLost, SocketTransport
from pyrunc.errors import PeerError
from tests.support.spdy import ClientMultiplexer

V4 = "v4.channel.k8s.io"
OUTCOME_LIMIT_BYTES = 64 * 1024


@dataclass(slots=True)
class Terminal:
    """A client's standard streams in a session. `sizes` yields the (columns, lines) of its
    terminal."""

    stdin: AsyncIterator[bytes] | None = None
    stdout_fd: int | None = None
    stderr_fd: int | None = None
    sizes: AsyncIterator[tuple[int, int]] | None = None


def address_of(server: StreamingServer) -> tuple[str, int]:
    """Return the host and port on which the server listens."""
    return server._host, server._port


async def run(url: str, terminal: Terminal) -> int:
    """Run the session of a streaming URL to its end; return its exit code. Raises `PeerError` if
    the session fails.

    The fields of `terminal` decide which streams are opened; the request for `url` must
    have named the same streams.
    """
    async with connect(url, V4) as multiplexer:
        try:
            return await _serve(multiplexer, terminal)
        except StreamGone:
            raise PeerError("the connection was lost before the session had ended") from None


@asynccontextmanager
async def connect(url: str, protocol: str) -> AsyncIterator[ClientMultiplexer]:
    """Provide a SPDY connection to a streaming URL. Raises `PeerError`."""
    transport = await _upgrade(url, protocol)
    multiplexer = ClientMultiplexer(transport)
    reading = asyncio.create_task(multiplexer.run())
    try:
        yield multiplexer
        multiplexer.leave()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await transport.close(linger_s=1.0)


async def _serve(multiplexer: ClientMultiplexer, terminal: Terminal) -> int:
    error = await _open(multiplexer, "error")
    await error.end()
    inputs, outputs = [], []
    if terminal.stdout_fd is not None:
        out = await _open(multiplexer, "stdout")
        outputs.append(asyncio.create_task(_copy_out(out.inbound, terminal.stdout_fd)))
    if terminal.stderr_fd is not None:
        out = await _open(multiplexer, "stderr")
        outputs.append(asyncio.create_task(_copy_out(out.inbound, terminal.stderr_fd)))
    if terminal.sizes is not None:
        inputs.append(
            asyncio.create_task(_copy_sizes(terminal.sizes, await _open(multiplexer, "resize")))
        )
    if terminal.stdin is not None:
        inputs.append(
            asyncio.create_task(_copy_in(terminal.stdin, await _open(multiplexer, "stdin")))
        )
    try:
        exit_code = _exit_code(await _read_all(error.inbound))
        await asyncio.gather(*outputs)
        return exit_code
    finally:
        for task in (*inputs, *outputs):
            task.cancel()
        await asyncio.gather(*inputs, *outputs, return_exceptions=True)


async def _open(multiplexer: ClientMultiplexer, role: str) -> MultiplexedStream:
    return await multiplexer.open({"streamtype": [role]})


async def _copy_in(source: AsyncIterator[bytes], out: Outbound) -> None:
    try:
        async for data in source:
            await out.write(data)
        await out.end()
    except StreamGone:
        pass


async def _copy_out(inbound: Inbound, fd: int) -> None:
    try:
        while data := await inbound.read():
            await write_all(fd, data)
    except OSError:
        inbound.discard()


async def _copy_sizes(sizes: AsyncIterator[tuple[int, int]], out: Outbound) -> None:
    try:
        async for width, height in sizes:
            await out.write(json.dumps({"Width": width, "Height": height}).encode())
    except StreamGone:
        pass


async def _read_all(inbound: Inbound) -> bytes:
    whole = b""
    while data := await inbound.read():
        whole += data
        if len(whole) > OUTCOME_LIMIT_BYTES:
            raise PeerError("the outcome of a session is too long")
    return whole


def _exit_code(outcome: bytes) -> int:
    """Return the exit code in a Status object. Raises `PeerError` if the session failed, or if the
    object is no Status."""
    try:
        status = json.loads(outcome)
        if status["status"] == "Success":
            return 0
        if status.get("reason") != "NonZeroExitCode":
            raise PeerError(str(status.get("message", "the session failed")))
        causes = status["details"]["causes"]
        return int(next(cause["message"] for cause in causes if cause["reason"] == "ExitCode"))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise PeerError(f"the session ended with {outcome[:200]!r}") from None


async def _upgrade(url: str, protocol: str) -> SocketTransport:
    """Connect to the URL's server and upgrade the connection to SPDY/3.1."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise PeerError(f"not a streaming URL: {url[:100]!r}")
    try:
        sock = await asyncio.to_thread(socket.create_connection, (parts.hostname, parts.port), 10.0)
    except OSError as error:
        raise PeerError(f"connecting to {parts.netloc}: {error.strerror}") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = SocketTransport(sock)
    try:
        async with asyncio.timeout(30):
            await _handshake(transport, parts.netloc, parts.path, protocol)
    except (ConnectionLost, TimeoutError, h11.RemoteProtocolError) as error:
        transport.abort()
        raise PeerError(f"opening a session at {parts.netloc}: {error or 'timed out'}") from None
    except BaseException:
        transport.abort()
        raise
    return transport


async def _handshake(transport: SocketTransport, host: str, path: str, protocol: str) -> None:
    http = h11.Connection(h11.CLIENT)
    fields = [
        ("Host", host),
        ("Connection", "Upgrade"),
        ("Upgrade", "SPDY/3.1"),
        ("X-Stream-Protocol-Version", protocol),
    ]
    await transport.send(
        (
            http.send(
                h11.Request(method="POST", target=path, headers=[*fields, ("Content-Length", "0")])
            )
            or b""
        )
        + (http.send(h11.EndOfMessage()) or b"")
    )
    text = b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(bytes(await transport.receive()))
        elif isinstance(event, h11.InformationalResponse) and event.status_code == 101:
            transport.unread(bytes(http.trailing_data[0]))
            return
        elif isinstance(event, h11.Data):
            text += event.data
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            raise PeerError(
                f"the streaming server refused: {text.decode('utf-8', 'replace').strip()[:200]}"
            )
