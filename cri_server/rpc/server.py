"""The gRPC server on a unix socket: accepts connections, keeps what all of them together may hold,
ends them in order.

At the limit of connections the one that has been idle for longest makes room, so that a flood of
silent ones keeps nobody out; a gRPC client connects again when it needs to.
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
from cri_server.rpc.link import Link
from cri_server.rpc.methods import Table
from pyrunc.errors import WrongState

log = logging.getLogger(__name__)

BACKLOG, ACCEPT_AT_ONCE = 512, 32
CONNECTIONS_LIMIT = 1024
CALLS_LIMIT = 8192  # tasks of all connections
LARGE_LIMIT_BYTES = 256 << 20  # requests of all connections that come in parts
READ_BYTES = 16 << 10  # of one connection before it is another one's turn
GREETING_S = 10.0
COMPLAINT_INTERVAL_S = 10.0
SOCKET_MODE = 0o660


class Server:
    """Answers the calls of `methods` on the socket at `path`. What links share is public; they are
    its only users."""

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
        """`owner`: uid and gid of the socket, None: ours; `mode` its permission bits."""
        self.methods, self.limits, self.greeting_s = methods, limits or Limits(), greeting_s
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._path, self._owner, self._mode = path, owner, mode
        self._links: set[Link] = set()
        self._silent: dict[Link, None] = {}  # those that have made no call yet, oldest first
        self._listener: asyncio.Server | None = None
        self._connections_limit = connections_limit()
        self._calls = self._large_bytes = 0
        # By kind: when the last was logged, and how many were not since.
        self._complaints: dict[str, tuple[float, int]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self) -> None:
        """Listen, for the owner. Raises WrongState when a living server listens there, OSError."""
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        unlink_stale(self._path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o777 & ~self._mode)
            try:
                sock.bind(str(self._path))
            finally:
                os.umask(before)
            if self._owner is not None:
                os.chown(self._path, *self._owner)
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_unix_server(
                lambda: Link(self), sock=sock, backlog=ACCEPT_AT_ONCE
            )
            # asyncio takes its figure for both, and would go beyond the limit in one go
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise

    async def stop(self, timeout_s: float) -> None:
        """Take no more calls, let those that run end for `timeout_s`, then cancel them; remove the
        socket."""
        if self._listener is None:
            return
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for link in list(self._links):
            link.drain()
        for wait_s, end in ((timeout_s, Link.stop), (1.0, Link.abort)):
            try:
                async with asyncio.timeout(wait_s):
                    await self._empty.wait()
                return
            except TimeoutError:
                for link in list(self._links):
                    end(link)

    @property
    def calls(self) -> int:
        """How many are being answered."""
        return self._calls

    # -- for links

    def joined(self, link: Link) -> None:
        """A connection was accepted; at the limit another one goes, or this one when all others are
        busy."""
        if len(self._links) >= self._connections_limit:
            count = len(self._links)
            text = f"{count} connections are the limit: the one that was idle for longest is closed"
            self.complain("connections", text)
            idle = self._longest_idle() or link
            self._discard(idle)
            idle.evict()
        self._links.add(link)
        self._silent[link] = None
        self._empty.clear()

    def _longest_idle(self) -> Link | None:
        """One that has never made a call before all others, and one that asks for nothing before
        one that is half-way."""
        if self._silent:
            return next(iter(self._silent))
        candidates = [link for link in self._links if link.idle]
        candidates = candidates or [link for link in self._links if not link.answering]
        return min(candidates, key=lambda link: link.active_s, default=None)

    def _discard(self, link: Link) -> None:
        self._links.discard(link)
        self._silent.pop(link, None)

    def spoke(self, link: Link) -> None:
        """A connection makes its first call."""
        self._silent.pop(link, None)

    def left(self, link: Link) -> None:
        """A connection has ended."""
        self._discard(link)
        if not self._links:
            self._empty.set()

    def started(self) -> bool:
        """A task wants to start: whether it may."""
        if self._calls >= CALLS_LIMIT:
            return False
        self._calls += 1
        return True

    def ended(self) -> None:
        """A task that had started has ended."""
        self._calls -= 1

    def reserve(self, size: int) -> bool:
        """A large request of `size` bytes is coming: whether there is room."""
        if self._large_bytes + size > LARGE_LIMIT_BYTES:
            return False
        self._large_bytes += size
        return True

    def release(self, size: int) -> None:
        """A large request has been answered or dropped."""
        self._large_bytes -= size

    def complain(self, kind: str, text: str) -> None:
        """Log what clients do wrong, but not for each of thousands: one of a kind at a time."""
        now_s = time.monotonic()
        last_s, unsaid = self._complaints.get(kind, (-COMPLAINT_INTERVAL_S, 0))
        if now_s - last_s < COMPLAINT_INTERVAL_S:
            self._complaints[kind] = last_s, unsaid + 1
            return
        log.warning("%s%s", text, f" (and {unsaid} such complaints before it)" if unsaid else "")
        self._complaints[kind] = now_s, 0


def connections_limit() -> int:
    """A quarter of the descriptors that this process may have, at most `CONNECTIONS_LIMIT`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        CONNECTIONS_LIMIT
        if soft == resource.RLIM_INFINITY
        else max(1, min(CONNECTIONS_LIMIT, soft // 4))
    )


def unlink_stale(path: Path) -> None:
    """Remove the socket of a dead server. Raises WrongState for a living one's, and for what is no
    socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():  # connect(2) to a file of any other kind says the same
                raise WrongState(f"{path} is not a socket") from None
            path.unlink(missing_ok=True)
            return
    raise WrongState(f"another server listens at {path}")
