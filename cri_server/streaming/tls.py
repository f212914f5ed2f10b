"""Terminates TLS for the streaming server: copies a connection's decrypted bytes to one end of a
socket pair. The server serves the other end like a plain connection.

The certificate is loaded again when its files change, so that a renewal needs no restart.
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

from cri_server.operations.tasks import background

log = logging.getLogger(__name__)

READ_BYTES = 64 << 10
FLUSH_S = 5.0


class NoHandshake(Exception):
    """The TLS handshake failed: the client spoke no TLS, had no valid certificate, or was too
    slow."""


@dataclass
class Tls:
    """The server's TLS settings, as paths of PEM files.

    - `certificate`: the certificate with its chain.
    - `key`: the certificate's private key.
    - `client_ca`: the CA that signs client certificates; empty: clients need no certificate.
    """

    certificate: str
    key: str
    client_ca: str = ""
    _context: ssl.SSLContext | None = field(default=None, init=False)
    _read_at: tuple[int, ...] = field(default=(), init=False)

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection. Raises OSError (also ssl.SSLError) or
        ValueError if the first load of the files fails. If a later load fails, logs the error and
        returns the previous context."""
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
            log.error("streaming: keeping the previous certificate: %s", error)
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # HTTP/2 has no Upgrade (RFC 9113, section 8.6), which SPDY and WebSocket need.
        context.set_alpn_protocols(["http/1.1"])
        # Without a callback OpenSSL asks for a password at the terminal, and the server would hang.
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
    """Decrypt the TLS connection over `sock`; yield a socket that carries the plain bytes. Closes
    both sockets after the `with` block. `handshake_s`: the time limit of the handshake.

    Raises NoHandshake.
    """
    reader = asyncio.StreamReader(limit=READ_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=tls.context(), ssl_handshake_timeout=handshake_s
        )
    except (OSError, ValueError) as error:  # also when the client disconnects
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
        except TimeoutError:  # the client does not read, or does not answer close_notify
            transport.abort()
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            inner.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, inner: socket.socket
) -> None:
    """Copy data both ways between the TLS connection (`reader`, `writer`) and the socket
    `inner`. Ends when the other end of `inner` is closed and everything is sent, or when the client
    disconnects."""
    loop = asyncio.get_running_loop()

    async def inwards() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await loop.sock_sendall(inner, data)
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_WR)

    async with background(inwards(), "TLS input"):
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(inner, READ_BYTES):
                writer.write(data)
                await writer.drain()
        # Also after ECONNRESET: the other end was closed with unread input.
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()
