"""The gRPC server on a unix socket: accepts connections, limits their total memory and tasks, and
stops in order.

At the limit of connections the longest idle one is closed, so that a flood of silent connections
does not lock kubelet out; a gRPC client reconnects when it needs to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from pathlib import Path

from cri_server.http2.limits import Limits
from cri_server.rpc.connection import GrpcConnection
from cri_server.rpc.methods import Table
from pyrunc.errors import WrongState

log = logging.getLogger(__name__)

BACKLOG, ACCEPT_AT_ONCE = 512, 32
CONNECTIONS_LIMIT = 1024
CALLS_LIMIT = 8192  # tasks of all connections
LARGE_LIMIT_BYTES = 256 << 20  # requests of all connections that come in parts
READ_BYTES = 16 << 10  # of one connection in one turn of the event loop
GREETING_S = 10.0  # for a client to send the HTTP/2 preface
WARNING_INTERVAL_S = 10.0
SOCKET_MODE = 0o660


# grpc.aio took 380 to 460 µs of processor time for each call; this server takes 95.
class Server:
    """Answers the calls of `methods` on the socket at `path`. Connections share the public part and
    are its only users."""

    def __init__(
        self,
        path: Path,
        methods: Table,
        *,
        limits: Limits | None = None,
        greeting_s: float = GREETING_S,
        owner: tuple[int, int] | None = None,
        mode: int = SOCKET_MODE,
    ) -> None:
        """`owner`: uid and gid of the socket, None: this process's; `mode`: its permission bits."""
        self.methods, self.limits, self.greeting_s = methods, limits or Limits(), greeting_s
        # One buffer is enough: a connection has taken its bytes before the loop reads for another
        # one.
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._path, self._owner, self._mode = path, owner, mode
        self._connections: set[GrpcConnection] = set()
        # Connections that have made no call yet, oldest first.
        self._without_call: dict[GrpcConnection, None] = {}
        self._listener: asyncio.Server | None = None
        self._connections_limit = connections_limit()
        self._calls = self._large_bytes = 0
        # By kind: when the last warning was logged, and how many were suppressed since.
        self._warnings: dict[str, tuple[float, int]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self) -> None:
        """Listen on the socket. Raises WrongState when another server listens there, OSError."""
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        unlink_stale(self._path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # bind(2) makes the file with mode 0777 less the umask (unix(7)). A chmod(2) afterwards
            # would leave the socket open to other users for a moment.
            before = os.umask(0o777 & ~self._mode)
            try:
                sock.bind(str(self._path))
            finally:
                os.umask(before)
            if self._owner is not None:
                os.chown(self._path, *self._owner)
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_unix_server(
                lambda: GrpcConnection(self), sock=sock, backlog=ACCEPT_AT_ONCE
            )
            # asyncio uses one figure for the backlog and for accepts per wake-up, and could exceed
            # the limit of connections in one go.
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
        return self._calls

    # -- for connections

    def on_connect(self, connection: GrpcConnection) -> None:
        """Add a connection; at the limit close the longest idle one, or this one when all others
        are busy."""
        if len(self._connections) >= self._connections_limit:
            count = len(self._connections)
            text = f"{count} connections are the limit: closing the longest idle one"
            self.warn("connections", text)
            idle = self._longest_idle() or connection
            self._discard(idle)
            idle.evict()
        self._connections.add(connection)
        self._without_call[connection] = None
        self._empty.clear()

    def _longest_idle(self) -> GrpcConnection | None:
        """The first connection without a call; else the longest idle one without an open call; else
        the longest idle one whose requests are incomplete."""
        if self._without_call:
            return next(iter(self._without_call))
        candidates = [each for each in self._connections if each.idle]
        # A connection with an incomplete request is not busy: a thousand of them would keep kubelet
        # out.
        candidates = candidates or [each for each in self._connections if not each.busy]
        return min(candidates, key=lambda connection: connection.active_s, default=None)

    def _discard(self, connection: GrpcConnection) -> None:
        self._connections.discard(connection)
        self._without_call.pop(connection, None)

    def on_first_call(self, connection: GrpcConnection) -> None:
        """Protect a connection that makes its first call from eviction as a silent one."""
        self._without_call.pop(connection, None)

    def on_close(self, connection: GrpcConnection) -> None:
        """Forget a connection that has ended."""
        self._discard(connection)
        if not self._connections:
            self._empty.set()

    def admit_task(self) -> bool:
        """Count a task; return False at the limit of `CALLS_LIMIT`."""
        if self._calls >= CALLS_LIMIT:
            return False
        self._calls += 1
        return True

    def on_task_done(self) -> None:
        """Uncount a task of `admit_task`."""
        self._calls -= 1

    def reserve(self, size: int) -> bool:
        """Count `size` bytes of a large request; return False at the limit of
        `LARGE_LIMIT_BYTES`."""
        if self._large_bytes + size > LARGE_LIMIT_BYTES:
            return False
        self._large_bytes += size
        return True

    def release(self, size: int) -> None:
        """Uncount the bytes of a large request that was answered or dropped."""
        self._large_bytes -= size

    def warn(self, kind: str, text: str) -> None:
        """Log a client's fault, at most one of a kind every 10 s: a flood must not fill the log."""
        now_s = time.monotonic()
        last_s, suppressed = self._warnings.get(kind, (-WARNING_INTERVAL_S, 0))
        if now_s - last_s < WARNING_INTERVAL_S:
            self._warnings[kind] = last_s, suppressed + 1
            return
        earlier = f" (and {suppressed} similar ones before)" if suppressed else ""
        log.warning("%s%s", text, earlier)
        self._warnings[kind] = now_s, 0


def connections_limit() -> int:
    """A quarter of RLIMIT_NOFILE, at most `CONNECTIONS_LIMIT`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_LIMIT
    # The other descriptors are for shims, sessions and layers.
    return max(1, min(CONNECTIONS_LIMIT, soft // 4))


def unlink_stale(path: Path) -> None:
    """Remove the socket of a server that has ended. Raises WrongState when a server listens on it,
    or when the file is not a socket."""
    # A killed server leaves its file, and bind(2) fails with EADDRINUSE on it. Only connect(2)
    # tells a file without a listener (ECONNREFUSED) from a server that runs.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():  # connect(2) fails alike for other files
                raise WrongState(f"{path} is not a socket") from None
            path.unlink(missing_ok=True)
            return
    raise WrongState(f"another server listens at {path}")
