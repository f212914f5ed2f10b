"""TLS before the streaming server: a connection's bytes go through a socket pair, whose other end
is an ordinary connection.

The certificate is read again when its files change, so that one that is renewed needs no restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

READ_BYTES = 64 << 10
FLUSH_S = 5.0


class NoHandshake(Exception):
    """The client speaks no TLS, shows no certificate that we take, or is too slow."""


@dataclass
class Tls:
    """PEM files: our certificate with its chain, its key, and the authorities of clients'
    certificates (empty: clients show none)."""

    certificate: str
    key: str
    client_ca: str = ""
    _context: ssl.SSLContext | None = field(default=None, init=False)
    _read_at: tuple[int, ...] = field(default=(), init=False)

    def context(self) -> ssl.SSLContext:
        """For the next connection. Raises OSError (ssl.SSLError is one), ValueError when there was
        none before."""
        try:
            times = tuple(
                os.stat(path).st_mtime_ns
                for path in (self.certificate, self.key, self.client_ca)
                if path
            )
            if self._context is None or times != self._read_at:
                self._context, self._read_at = self._load(), times
        except (OSError, ValueError) as error:
            if self._context is None:
                raise
            log.error("streaming: the certificate stays the one before: %s", error)
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self.certificate, self.key, password=_no_password)
        if self.client_ca:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _no_password() -> str:
    raise ValueError("the key has a password")


@contextlib.asynccontextmanager
async def terminated(
    sock: socket.socket, tls: Tls, handshake_s: float
) -> AsyncIterator[socket.socket]:
    """While inside, a socket whose bytes are those of the TLS connection over `sock`, which is
    closed at the end.

    Raises NoHandshake.
    """
    reader = asyncio.StreamReader(limit=READ_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=tls.context(), ssl_handshake_timeout=handshake_s
        )
    except (OSError, ValueError) as error:  # also of a client that leaves meanwhile
        sock.close()
        raise NoHandshake(str(error)) from None
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    plain, inner = socket.socketpair()
    inner.setblocking(False)
    pump = asyncio.create_task(_pump(reader, writer, inner))
    try:
        yield plain
    finally:
        plain.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await pump
        except TimeoutError:  # it does not take what was sent, or does not answer that this was all
            transport.abort()
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            inner.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, inner: socket.socket
) -> None:
    """Both ways until our side has said all, or the client is gone."""
    loop = asyncio.get_running_loop()

    async def inwards() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await loop.sock_sendall(inner, data)
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_WR)

    incoming = asyncio.create_task(inwards())
    try:
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(inner, READ_BYTES):
                writer.write(data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()
    finally:
        incoming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await incoming
