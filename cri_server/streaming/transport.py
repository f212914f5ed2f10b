"""Moving the bytes of a connection, with back-pressure both ways.

Two kinds of output share a socket: `send` is for data and waits until the kernel has taken it;
`post` is for small answers (a ping's, a reset) that the reading side makes and must not wait for.
Posted bytes go out before the next data, in order, and are bounded: a peer that asks without
reading the answers loses the connection.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from cri_server.streaming.descriptors import readable, writable
from cri_server.streaming.streams import Budget

POSTED_LIMIT_BYTES = 128 * 1024
RECEIVE_BYTES = 64 * 1024
# after so much the other tasks get a turn even if the socket is never busy
TURN_BYTES = 1024 * 1024
LINGER_S = 5.0
PROBE_S = 1.0


class ConnectionLost(Exception):
    """The peer is gone, silent for too long, or does not read what it asked for."""


class Leaving(Protocol):
    """What can tell that the peer is gone."""

    async def hung_up(self) -> None:
        """Return when the peer has closed its side, also while nobody receives."""


class Wire(Leaving, Protocol):
    """A stream of bytes to and from one peer."""

    async def receive(self) -> bytes | memoryview:
        """The next bytes, nothing at the end; a view is valid until the next call."""
        ...

    async def send(self, *parts: bytes) -> None:
        """Send the parts as one piece, behind what was posted. Raises `ConnectionLost`."""

    def post(self, data: bytes) -> None:
        """Send soon, without waiting. Raises `ConnectionLost` when too much waits already."""


async def room_or_hang_up(budget: Budget, wire: Leaving, probe: Callable[[], None]) -> bool:
    """Wait, without reading, until the streams of a connection have room; false if the client
    leaves before that.

    The client's FIN may never come: it waits behind what the client had sent and this side does not
    take. So something meaningless is sent now and then, which the kernel of a client that is gone
    answers with a reset. It is not a ping: a Go client that is stuck in sending would be stuck in
    answering too, and stop reading.
    """
    room, leaving = asyncio.create_task(budget.room()), asyncio.create_task(wire.hung_up())
    try:
        while not room.done() and not leaving.done():
            done, _ = await asyncio.wait(
                (room, leaving), timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                probe()
        return room.done()
    finally:
        room.cancel()
        leaving.cancel()
        await asyncio.gather(room, leaving, return_exceptions=True)


class SocketWire:
    """A `Wire` over a connected stream socket, which it owns until `close`.

    The connection is lost after `idle_s` without a byte in either direction.
    """

    def __init__(self, sock: socket.socket, idle_s: float = 4 * 3600) -> None:
        sock.setblocking(False)
        self._socket, self._idle_s, self._ahead = sock, idle_s, b""
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._turn = asyncio.Lock()
        self._posted = bytearray()
        self._flushing = False
        self._lost = False
        self._since_turn_bytes = 0
        self._active_at = self._loop.time()

    # ---- in ----

    async def receive(self) -> bytes | memoryview:
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        while True:
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                await self._readable()
            except OSError as error:
                raise self._lose(error) from None
            else:
                await self._moved(size)
                return memoryview(self._buffer)[:size]

    def unread(self, data: bytes) -> None:
        """Give bytes back that belong to what comes next; `receive` returns them first."""
        self._ahead = data + self._ahead

    async def _readable(self) -> None:
        while True:
            left_s = self._active_at + self._idle_s - self._loop.time()
            if left_s <= 0:
                raise ConnectionLost(f"nothing was sent for {self._idle_s:.0f} s")
            try:
                async with asyncio.timeout(left_s):
                    return await readable(self._socket.fileno())
            except TimeoutError:
                continue

    async def hung_up(self) -> None:
        with select.epoll() as watch:
            watch.register(self._socket, select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
            await readable(watch.fileno())

    # ---- out ----

    async def send(self, *parts: bytes) -> None:
        try:
            async with self._turn:
                await self._transmit(parts)
        finally:
            if self._posted and not self._turn.locked():
                self._flush()

    def post(self, data: bytes) -> None:
        self._posted += data
        if len(self._posted) > POSTED_LIMIT_BYTES:
            raise ConnectionLost("the peer does not read the answers to what it sends")
        if not self._turn.locked():
            self._flush()

    async def _transmit(self, parts: Sequence[bytes]) -> None:
        self._stop_flushing()
        views = [memoryview(part) for part in (bytes(self._posted), *parts) if part]
        self._posted.clear()
        try:
            while views:
                try:
                    sent = self._socket.sendmsg(views)
                except BlockingIOError:
                    await writable(self._socket.fileno())
                except OSError as error:
                    raise self._lose(error) from None
                else:
                    views = _behind(views, sent)
                    await self._moved(sent)
        except asyncio.CancelledError:
            # Half a frame is out. The rest must follow, or the peer reads nonsense.
            self._posted[:0] = b"".join(views)
            raise

    def _flush(self) -> None:
        """Send what was posted as far as the kernel takes it, and the rest when it does."""
        try:
            sent = (
                self._socket.send(self._posted)
                if self._posted and not self._lost
                else len(self._posted)
            )
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(error)
            sent = len(self._posted)
        del self._posted[:sent]
        if not self._posted:
            self._stop_flushing()
        elif not self._flushing:
            self._flushing = True
            self._loop.add_writer(self._socket.fileno(), self._flush_later)

    def _flush_later(self) -> None:
        if not self._turn.locked():
            self._flush()

    def _stop_flushing(self) -> None:
        if self._flushing:
            self._flushing = False
            self._loop.remove_writer(self._socket.fileno())

    async def _moved(self, size: int) -> None:
        self._active_at = self._loop.time()
        self._since_turn_bytes += size
        if self._since_turn_bytes >= TURN_BYTES:
            self._since_turn_bytes = 0
            await asyncio.sleep(0)

    def _lose(self, error: OSError) -> ConnectionLost:
        self._lost = True
        return ConnectionLost(error.strerror or "connection lost")

    # ---- the end ----

    async def close(self, linger_s: float = LINGER_S) -> None:
        """Send what was posted, say that this was all, wait a little for the peer to do the same,
        and close.

        Closing a socket while there is something to read makes the kernel send a reset, which can
        overtake what the peer has not read yet; hence the wait.
        """
        try:
            async with asyncio.timeout(linger_s):
                await self.send()
                self._socket.shutdown(socket.SHUT_WR)
                while await self.receive():
                    pass
        except (ConnectionLost, OSError, TimeoutError):
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._lost = True
        if self._socket.fileno() >= 0:
            self._stop_flushing()
            self._socket.close()


def _behind(views: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of the views when `sent` bytes of them are gone."""
    for index, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[index + 1 :]]
        sent -= len(view)
    return []
