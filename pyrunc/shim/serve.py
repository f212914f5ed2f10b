"""Serves a socket of the shim: any number of clients, one answer for each call, and events to all
clients. A client that does not read does not delay the others."""

from __future__ import annotations

import os
import struct
from _socket import SO_PEERCRED, SOL_SOCKET, socket

from pyrunc import ipc
from pyrunc.errors import Error, Unsupported, to_error
from pyrunc.kernel.fd import close_all
from pyrunc.shim.loop import BROKEN, READABLE, WRITABLE
from pyrunc.shim.messages import message_of
from pyrunc.shim.warn import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from pyrunc.ipc import Message
    from pyrunc.records import Record, Request
    from pyrunc.shim.loop import EventLoop
    from pyrunc.shim.messages import Event

    AnyRequest = TypeVar("AnyRequest", bound=Request)
    Handler = tuple[str, Callable[["ShimCall"], None]]

UNSENT_LIMIT = 4096
ACCEPT_AGAIN_S = 0.1  # after an error of accept(2), such as too many open descriptors
_UCRED = struct.Struct("iII")


def handler(kind: type[AnyRequest], function: Callable[[ShimCall, AnyRequest], None]) -> Handler:
    """Return an item for the argument `calls` of `ShimServer`. With this item the server calls
    `function(call, request)` for each request of the class `kind`. `function` answers `call`, at
    once or later, or raises the error to send."""
    return kind.call, lambda call: function(call, kind.of(call.message))


class ShimCall:
    """A request of a client. It must be answered exactly once, by `answer` or `fail`."""

    def __init__(self, connection: ClientConnection, message: Message, fds: list[int]) -> None:
        self.connection = connection
        self._fds = fds
        self.name = str(message.get("call"))
        self._id, self.message, self._answered = message.get("id", 0), message, False

    def take_fds(self) -> list[int]:
        """Return the request's descriptors, which the caller closes."""
        fds, self._fds = self._fds, []
        return fds

    def close_fds(self) -> None:
        """Close the request's descriptors, unless `take_fds` has returned them."""
        close_all(self.take_fds())

    def answer(self, answer: Record | None = None, fds: Sequence[int] = ()) -> None:
        """Send the result. The connection closes the descriptors after they are sent."""
        self._send({"id": self._id, "ok": {} if answer is None else answer.to_fields()}, fds)

    def fail(self, error: Exception) -> None:
        """Answer the call with an error."""
        self._send({"id": self._id, "error": to_error(error, self.name).to_fields()}, ())

    def _send(self, message: Message, fds: Sequence[int]) -> None:
        assert not self._answered, f"{self.name} answered twice"
        self._answered = True
        self.connection.send(message, fds)


class ClientConnection:
    """The connection of one client: receives its requests, and queues messages until the client
    reads them."""

    def __init__(self, server: ShimServer, sock: socket) -> None:
        self._server, self._socket = server, sock
        self._unsent: list[tuple[bytes, list[int]]] = []
        self._waits_to_send = False
        self.closed = False
        server.loop.watch(sock.fileno(), READABLE, self._ready)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send the message, now or when the client reads, and close `fds` afterwards. A client with
        thousands of unread messages is disconnected."""
        if self.closed:
            close_all(fds)
            return
        # Always after the waiting messages, so that answers and events keep their order.
        self._unsent.append((ipc.encode(message), list(fds)))
        if len(self._unsent) > UNSENT_LIMIT:
            self.close()
        else:
            self._flush()

    def close(self) -> None:
        """Close the connection."""
        if self.closed:
            return
        self.closed = True
        self._server.loop.unwatch(self._socket.fileno())
        self._socket.close()
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self._server.on_close(self)

    def _ready(self, events: int) -> None:
        if events & WRITABLE:
            self._flush()
        if events & (READABLE | BROKEN) and not self.closed:
            self._receive()

    def _receive(self) -> None:
        try:
            received = ipc.receive(self._socket)
        except BlockingIOError:
            return
        except (OSError, Error) as error:
            warn(f"closing a client's connection: {error}")
            received = None
        if received is None:
            self.close()
            return
        message, fds = received
        call = ShimCall(self, message, fds)
        self._server.dispatch(call)
        call.close_fds()

    def _flush(self) -> None:
        while self._unsent:
            text, fds = self._unsent[0]
            try:
                ipc.send_text(self._socket, text, fds)
            except BlockingIOError:
                self._watch(waits_to_send=True)
                return
            except OSError:
                self.close()
                return
            close_all(fds)
            del self._unsent[0]
        self._watch(waits_to_send=False)

    def _watch(self, *, waits_to_send: bool) -> None:
        """Watch the socket for requests and, with `waits_to_send`, also for room to send."""
        if waits_to_send != self._waits_to_send:
            self._waits_to_send = waits_to_send
            events = READABLE | WRITABLE if waits_to_send else READABLE
            self._server.loop.watch(self._socket.fileno(), events, self._ready)


class ShimServer:
    """Accepts connections on the listening socket and dispatches their requests. `calls`: an item
    made by `handler` for each kind of request."""

    def __init__(
        self,
        loop: EventLoop,
        listener: int,
        calls: Sequence[Handler],
        on_disconnect: Callable[[ClientConnection], None],
    ) -> None:
        self.loop, self._calls, self._on_disconnect = loop, dict(calls), on_disconnect
        self._listener = socket(fileno=listener)
        self._listener.setblocking(False)
        self.connections: list[ClientConnection] = []
        loop.watch(listener, READABLE, self._accept)

    def event(self, event: Event) -> None:
        """Send the event to every client."""
        message = message_of(event)
        for connection in list(self.connections):
            connection.send(message)

    def descriptors(self) -> list[int]:
        """Return the sockets' descriptors, which a fork must close."""
        return [self._listener.fileno(), *(connection.fileno() for connection in self.connections)]

    def dispatch(self, call: ShimCall) -> None:
        """Run the handler of the call. If it raises an exception, answer with this error."""
        function = self._calls.get(call.name)
        try:
            if function is None:
                raise Unsupported(f"this shim has no call {call.name!r}")
            function(call)
        except Exception as error:
            call.fail(error)

    def on_close(self, connection: ClientConnection) -> None:
        """Forget a connection that was closed."""
        self.connections.remove(connection)
        self._on_disconnect(connection)

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self.connections):
            connection.close()
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()

    def _accept(self, events: int) -> None:
        """Accept all waiting clients. A client that still waited would miss the next event."""
        while True:
            try:
                fd, _ = self._listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError as error:
                # The client still waits in the backlog: the listening socket stays readable, and
                # the loop would call this method without end.
                warn(f"cannot accept a client, trying again: {error}")
                self.loop.unwatch(self._listener.fileno())
                self.loop.after(ACCEPT_AGAIN_S, self._accept_again)
                return
            self.add_client(fd)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.watch(self._listener.fileno(), READABLE, self._accept)

    def add_client(self, fd: int) -> None:
        """Serve a connected socket, which this server closes later. Closes the socket at once
        unless the client runs as root or as our user."""
        client = socket(fileno=fd)
        client.setblocking(False)
        # The uid alone is not enough: containerd's shims checked only that on abstract sockets, and
        # root in a host-network pod passed (CVE-2020-15257). Ours are in folders of mode 0700.
        _, uid, _ = _UCRED.unpack(client.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED.size))
        if uid in (0, os.geteuid()):
            self.connections.append(ClientConnection(self, client))
        else:
            client.close()
