"""Transports of bytes, with back-pressure in both directions.

`send` is for data, and waits until the kernel has accepted all of it. `post` is for small frames
such as replies to pings, and returns at once, because the task that receives must not wait. Posted
frames are sent in order and before the next data. Their total size is limited: a peer that does not
read them loses the connection.
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
# Other tasks get a turn after so many bytes, even if the socket is always ready.
TURN_BYTES = 1024 * 1024
LINGER_S = 5.0
IDLE_S = 4 * 3600.0  # the timeout of Kubernetes' streaming library for connections without traffic
PROBE_S = 1.0


class ConnectionLost(Exception):
    """The connection has ended: the peer has disconnected, was idle for too long, or does not read
    replies."""


class Transport(Protocol):
    """A stream of bytes to and from one peer."""

    async def receive(self) -> bytes | memoryview:
        """Return the next received bytes; empty at the end. A memoryview is valid until the next
        call."""
        ...

    async def send(self, *parts: bytes) -> None:
        """Send the parts one after the other, with nothing between them, after posted bytes. Raises
        `ConnectionLost`."""

    def post(self, data: bytes) -> None:
        """Queue a small reply and return at once. Raises `ConnectionLost` when too many bytes are
        queued."""

    async def hung_up(self) -> None:
        """Wait until the peer has closed its side, even while no task receives."""


async def room_or_hang_up(budget: Budget, transport: Transport, probe: Callable[[], None]) -> bool:
    """Wait, without reading, until `budget` is no longer exhausted. Return False if the client
    disconnects first.

    `probe` is called repeatedly, to detect a client that is gone. It must send an empty message
    that needs no reply.
    """
    room, leaving = asyncio.create_task(budget.room()), asyncio.create_task(transport.hung_up())
    try:
        while not room.done() and not leaving.done():
            done, _ = await asyncio.wait(
                (room, leaving), timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED
            )
            # The client's FIN may lie behind data that this side does not read. So send an empty
            # message: if the client is gone, its kernel answers with a reset. A ping would not do:
            # a Go client that blocks in sending answers none.
            if not done:
                probe()
        return room.done()
    finally:
        room.cancel()
        leaving.cancel()
        await asyncio.gather(room, leaving, return_exceptions=True)


class SocketTransport:
    """A `Transport` over a connected stream socket, which it owns and closes.

    The connection is lost after `idle_s` without traffic.
    """

    def __init__(self, sock: socket.socket, idle_s: float = IDLE_S) -> None:
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

    # ---- receiving ----

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
                await self._count_traffic(size)
                return memoryview(self._buffer)[:size]

    def unread(self, data: bytes) -> None:
        """Put received bytes back. The next `receive` returns them."""
        self._ahead = data + self._ahead

    async def _readable(self) -> None:
        while True:
            left_s = self._active_at + self._idle_s - self._loop.time()
            if left_s <= 0:
                raise ConnectionLost(f"no traffic for {self._idle_s:.0f} s")
            try:
                async with asyncio.timeout(left_s):
                    return await readable(self._socket.fileno())
            except TimeoutError:
                continue

    async def hung_up(self) -> None:
        with select.epoll() as watch:
            # asyncio can only wait for "readable", which unread data makes true at once. EPOLLRDHUP
            # reports the peer's FIN alone (epoll_ctl(2)).
            watch.register(self._socket, select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
            await readable(watch.fileno())

    # ---- sending ----

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
            raise ConnectionLost("the peer does not read replies")
        if not self._turn.locked():
            self._flush()

    async def _transmit(self, parts: Sequence[bytes]) -> None:
        self._stop_flushing()
        # One sendmsg(2) sends replies, header and data without a copy, and no packet has a header
        # alone.
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
                    views = _rest(views, sent)
                    await self._count_traffic(sent)
        except asyncio.CancelledError:
            # A part of a frame may be sent; its rest must follow before any other frame.
            self._posted[:0] = b"".join(views)
            raise

    def _flush(self) -> None:
        """Send the posted bytes that the kernel accepts now, and the rest once the socket is
        writable."""
        sendable = self._posted and not self._lost
        try:
            sent = self._socket.send(self._posted) if sendable else len(self._posted)
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

    async def _count_traffic(self, size: int) -> None:
        self._active_at = self._loop.time()
        self._since_turn_bytes += size
        if self._since_turn_bytes >= TURN_BYTES:
            self._since_turn_bytes = 0
            await asyncio.sleep(0)

    def _lose(self, error: OSError) -> ConnectionLost:
        self._lost = True
        return ConnectionLost(error.strerror or "connection lost")

    # ---- closing ----

    async def close(self, linger_s: float = LINGER_S) -> None:
        """Send posted bytes, half-close, wait up to `linger_s` until the peer closes its side, then
        close."""
        try:
            async with asyncio.timeout(linger_s):
                await self.send()
                self._socket.shutdown(socket.SHUT_WR)
                # Closing a socket with unread data makes the kernel send a reset, which discards
                # data that the peer has not read yet (RFC 2525, section 2.17).
                while await self.receive():
                    pass
        except (ConnectionLost, OSError, TimeoutError):
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        self._lost = True
        if self._socket.fileno() >= 0:
            self._stop_flushing()
            self._socket.close()


def _rest(views: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of `views` after `sent` bytes were sent."""
    for index, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[index + 1 :]]
        sent -= len(view)
    return []
