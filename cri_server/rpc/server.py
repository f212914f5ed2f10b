"""The gRPC server on a unix socket: accepts connections, and limits the memory and tasks of all
connections together.

At the limit of connections it closes the longest idle one, so that a flood of silent connections
does not lock kubelet out. A gRPC client reconnects when it needs to.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from pathlib import Path

from cri_server.http2.limits import Http2Limits
from cri_server.rpc import unix_socket
from cri_server.rpc.connection import GrpcConnection
from cri_server.rpc.methods import Table
from cri_server.rpc.shared import Shared

log = logging.getLogger(__name__)

BACKLOG, ACCEPT_AT_ONCE = 512, 32
CONNECTIONS_LIMIT = 1024
GREETING_S = 10.0  # for a client to send the HTTP/2 preface
SOCKET_MODE = 0o660


# grpc.aio took 380 to 460 µs of processor time for each call; this server takes 95.
class Server:
    """Answers the calls of `methods` on the socket at `path`."""

    def __init__(
        self,
        path: Path,
        methods: Table,
        *,
        limits: Http2Limits | None = None,
        greeting_s: float = GREETING_S,
        owner: tuple[int, int] | None = None,
        mode: int = SOCKET_MODE,
    ) -> None:
        """`greeting_s`: the time within which a client must send the HTTP/2 preface.

        `owner`: uid and gid of the socket file, None for those of this process; `mode`: the
        permission bits of the socket file.
        """
        self._shared = Shared(methods, limits or Http2Limits(), greeting_s)
        self._path, self._owner, self._mode = path, owner, mode
        self._connections: dict[GrpcConnection, None] = {}  # oldest first
        self._listener: asyncio.Server | None = None
        self._connections_limit = connections_limit()
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self) -> None:
        """Bind the socket and listen. Raises WrongState when another server listens on the socket,
        or the path belongs to another kind of file. Raises OSError when the socket cannot be bound.
        """
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        sock = unix_socket.bind(self._path, self._mode, self._owner)
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_unix_server(
                self._new_connection, sock=sock, backlog=ACCEPT_AT_ONCE
            )
            # asyncio uses `backlog` also as the number of connections that it accepts per wake-up.
            # With a large number it could exceed the limit of connections in one go.
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise

    async def stop(self, timeout_s: float) -> None:
        """Remove the socket, let running calls finish for `timeout_s`, then cancel them."""
        if self._listener is None:
            return
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.drain()
        for wait_s, end in ((timeout_s, GrpcConnection.stop), (1.0, GrpcConnection.abort)):
            try:
                async with asyncio.timeout(wait_s):
                    await self._empty.wait()
                return
            except TimeoutError:
                for connection in list(self._connections):
                    end(connection)

    @property
    def calls(self) -> int:
        """The number of calls that are being answered."""
        return self._shared.calls

    def _new_connection(self) -> GrpcConnection:
        return GrpcConnection(self._shared, self._on_open, self._on_close)

    def _on_open(self, connection: GrpcConnection) -> None:
        """Add a connection; at the limit close the longest idle one, or this one when all others
        are busy."""
        if len(self._connections) >= self._connections_limit:
            count = len(self._connections)
            text = f"{count} connections are the limit: closing the longest idle one"
            self._shared.warn("connections", text)
            idle = self._longest_idle() or connection
            self._connections.pop(idle, None)
            idle.evict()
        self._connections[connection] = None
        self._empty.clear()

    def _longest_idle(self) -> GrpcConnection | None:
        """Return the connection to close in favour of a new one: the first of these that exists, or
        None if all are busy.

        - the oldest connection that has never made a call;
        - the longest idle connection without an open call;
        - the longest idle connection whose open requests are all incomplete.
        """
        for connection in self._connections:
            if not connection.has_called:
                return connection
        candidates = [each for each in self._connections if each.idle]
        # A connection with an incomplete request is not busy: a thousand of them would keep kubelet
        # out.
        candidates = candidates or [each for each in self._connections if not each.busy]
        return min(candidates, key=lambda connection: connection.active_s, default=None)

    def _on_close(self, connection: GrpcConnection) -> None:
        """Forget a connection that has ended."""
        self._connections.pop(connection, None)
        if not self._connections:
            self._empty.set()


def connections_limit() -> int:
    """Return how many connections the server accepts: a quarter of RLIMIT_NOFILE, at most
    `CONNECTIONS_LIMIT`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_LIMIT
    # The other descriptors are for shims, sessions and layers.
    return max(1, min(CONNECTIONS_LIMIT, soft // 4))
