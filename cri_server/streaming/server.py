"""The streaming server: hands out single-use URLs, and accepts the connections to them.

The handler of connections (`connection`) is imported at the first session: its modules take 3 MiB,
and a node on which no sessions are opened does not need them.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import socket
from collections import Counter
from typing import TYPE_CHECKING

from cri_server.streaming.backend import (
    AttachOptions,
    Backend,
    ExecSessionOptions,
    PortForwardOptions,
)
from cri_server.streaming.tls import NoHandshake, Tls, terminated
from cri_server.streaming.tokens import Tickets

if TYPE_CHECKING:
    from cri_server.streaming.connection import Connections

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
CONNECTIONS_LIMIT = 2048
HANDLER_MODULE = "cri_server.streaming.connection"
UNOPENED_LIMIT = 256  # of these, connections without a redeemed ticket
BACKLOG = 512
KINDS = {ExecSessionOptions: "exec", AttachOptions: "attach", PortForwardOptions: "portforward"}
"""Type of a session's options -> the first part of its URL's path."""


class StreamingServer:
    """Serves exec, attach and port-forward sessions of `backend` at `host`:`port`; port 0 chooses a
    free port."""

    def __init__(
        self,
        backend: Backend,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tickets: Tickets | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._tickets, self._tls = tickets or Tickets(), tls
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._unopened: dict[asyncio.Task[None], None] = {}  # oldest first
        self._handler: Connections | None = None
        self.sessions: Counter[str] = Counter()  # that are open, by kind

    # ---- life ----

    async def start(self) -> None:
        """Listen. Raises `OSError` if the address cannot be used, and `OSError` or `ValueError` if
        the certificate or its key cannot be loaded."""
        if self._tls is not None:
            self._tls.context()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server(
            (self._host, self._port), family=family, backlog=BACKLOG
        )
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def close(self) -> None:
        """Stop listening and end all sessions."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def handler(self) -> Connections:
        """Return the object that serves connections. Imports its module at the first use."""
        if self._handler is None:
            from cri_server.streaming.connection import Connections

            self._handler = Connections(
                self._backend, self._tickets, self.sessions, self._on_ticket
            )
        return self._handler

    # ---- URLs ----

    def url_for(self, options: ExecSessionOptions | AttachOptions | PortForwardOptions) -> str:
        """Return a URL that opens the session `options` once, within a minute. Raises
        `ResourceExhausted` when too many URLs are unused."""
        kind = KINDS[type(options)]
        host = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{host}:{self._port}/{kind}/{self._tickets.issue(kind, options)}"

    # ---- connections ----

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # The connection stays in the backlog, so accept would fail again at once and use a
                # whole processor. Other errors, such as ECONNABORTED, belong to a connection that
                # is gone (accept(2)).
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning(
                        "streaming: cannot accept a connection, trying again: %s", error.strerror
                    )
                    await asyncio.sleep(0.2)
                continue
            if not self._make_room():
                sock.close()
                continue
            task = asyncio.create_task(self._connection(sock))
            self._connections.add(task)
            self._unopened[task] = None
            task.add_done_callback(self._on_connection_done)
            # Lets the task read its request before `_make_room` can close this connection in favour
            # of a newer one.
            await asyncio.sleep(0)

    def _make_room(self) -> bool:
        """Return whether the server can accept another connection. At a limit it first closes the
        oldest connection without a redeemed ticket, so that local users who connect without a
        ticket do not keep others out."""
        if len(self._unopened) < UNOPENED_LIMIT and len(self._connections) < CONNECTIONS_LIMIT:
            return True
        oldest = next(iter(self._unopened), None)
        if oldest is None:
            return False
        del self._unopened[oldest]
        oldest.cancel()
        return True

    def _on_connection_done(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._unopened.pop(task, None)

    async def _connection(self, sock: socket.socket) -> None:
        """Serve one accepted connection, over TLS if configured."""
        try:
            # In a thread, because the imports of `handler` take 30 ms.
            if self._handler is None:
                await asyncio.to_thread(importlib.import_module, HANDLER_MODULE)
        except BaseException:
            sock.close()
            raise
        # Nagle's algorithm would hold a keystroke's echo until the client's delayed ACK, 40 ms on
        # Linux.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Keepalives find a client whose machine has gone without a FIN (after two hours by default,
        # tcp(7)), which would otherwise hold its session until the idle timeout.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is None:
            return await self.handler.serve(sock)
        try:
            async with terminated(sock, self._tls, HANDSHAKE_S) as plain:
                await self.handler.serve(plain)
        except NoHandshake as error:
            log.debug("streaming: %s", error)

    def _on_ticket(self) -> None:
        if (task := asyncio.current_task()) is not None:
            self._unopened.pop(task, None)
