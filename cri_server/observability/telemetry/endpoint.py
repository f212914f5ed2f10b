"""An HTTP/1.1 server for metrics and `/healthz` on a unix socket or a TCP address, with h11.

It serves GET and HEAD without authentication: over TCP to every client that reaches the address,
over the unix socket to root and the socket's group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import h11

from cri_server.rpc import unix_socket
from pyrunc.errors import Error, WrongState

log = logging.getLogger(__name__)

REQUEST_S = 10.0  # to receive a request, and to send a reply
# More than twice the connections that asyncio accepts in one turn of its loop (a backlog of 100):
# each connection is read at least once before newer ones can displace it (`_make_room`).
CONNECTIONS_LIMIT = 256
READ_BYTES = 16 << 10
SOCKET_MODE = 0o660


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[str], Awaitable[Reply]]
"""Handles a request; the argument is its Accept header."""


class Endpoint:
    """Serves each of `routes` at its path. `address`: `unix:///PATH` or `HOST:PORT`."""

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        self._address, self._routes = address, routes
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], None] = {}
        """Connections that wait for their client, the longest waiting first."""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on `address`. Raises WrongState when that fails, for example because the address
        is in use."""
        try:
            self._server = await self._listen()
        except OSError as error:
            raise WrongState(
                f"metrics.address {self._address}: cannot listen: {error.strerror or error}"
            ) from None

    async def _listen(self) -> asyncio.Server:
        if not self._address.startswith("unix://"):
            host, _, port = self._address.rpartition(":")
            return await asyncio.start_server(self._accepted, host.strip("[]"), int(port))
        sock = unix_socket.bind(Path(self._address.removeprefix("unix://")), SOCKET_MODE)
        return await asyncio.start_unix_server(self._accepted, sock=sock)

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        if self._address.startswith("unix://"):
            Path(self._address.removeprefix("unix://")).unlink(missing_ok=True)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if self._make_room():
                self._connections.add(task)
                await self._serve(task, reader, writer)
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
            # The client has disconnected, is too slow, or broke the protocol; or the server has
            # cancelled the task.
            pass
        finally:
            self._connections.discard(task)
            self._idle.pop(task, None)
            # close() would wait for a client that does not read.
            writer.transport.abort()

    def _make_room(self) -> bool:
        """Return whether another connection may be accepted. At `CONNECTIONS_LIMIT` first close the
        connection that has been idle longest: otherwise a local user could lock out Prometheus with
        silent connections. If none is idle, no other connection may be accepted."""
        if len(self._connections) < CONNECTIONS_LIMIT:
            return True
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self._idle.pop(oldest)
        self._connections.discard(oldest)
        oldest.cancel()
        return True

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve requests until either side closes the connection."""
        # h11 buffers the headers of a request until they are complete, so they need a bound.
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=READ_BYTES)
        while True:
            self._idle[task] = None
            async with asyncio.timeout(REQUEST_S):
                try:
                    request = await _request(connection, reader)
                except h11.RemoteProtocolError as error:
                    status, text = error.error_status_hint, f"{error}\n".encode()
                    await _send(connection, writer, "GET", Reply(status, text), last=True)
                    return
            if request is None:
                return
            self._idle.pop(task, None)
            reply = await self._answer(request)
            self._idle[task] = None
            async with asyncio.timeout(REQUEST_S):
                await _send(connection, writer, request.method.decode(), reply)
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()
            del self._idle[task]  # the next wait begins now

    async def _answer(self, request: h11.Request) -> Reply:
        if request.method not in (b"GET", b"HEAD"):
            return Reply(405, b"the method must be GET or HEAD\n")
        route = self._routes.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
        if route is None:
            return Reply(
                404, f"not found; there are {' and '.join(sorted(self._routes))}\n".encode()
            )
        accept = b",".join(value for name, value in request.headers if name == b"accept")
        try:
            return await route(accept.decode("latin-1"))
        except (Error, OSError) as error:
            log.warning("cannot answer a request for metrics: %s", error)
        except Exception:
            log.exception("metrics: unexpected error")
        return Reply(500, b"see the server's log\n")


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """Read the next request and skip its body. Return None when no further request can come on this
    connection. Raises RemoteProtocolError."""
    request: h11.Request | None = None
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.EndOfMessage):
            return request
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


async def _send(
    connection: h11.Connection,
    writer: asyncio.StreamWriter,
    method: str,
    reply: Reply,
    *,
    last: bool = False,
) -> None:
    headers = [("Content-Type", reply.content_type), ("Content-Length", str(len(reply.body)))]
    if last:
        headers.append(("Connection", "close"))
    data = connection.send(h11.Response(status_code=reply.status, headers=headers)) or b""
    if method != "HEAD":
        data += connection.send(h11.Data(data=reply.body)) or b""
    writer.write(data + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
