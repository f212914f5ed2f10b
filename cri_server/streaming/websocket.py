"""WebSocket sessions: whole messages (`Messages`), and channels whose data comes in messages
(`Channels`). `Messages` also carries a SPDY connection that is tunnelled through WebSocket.

A message has a channel's number and data for this channel: an octet and bytes, or an ASCII digit
and base64 text. Only in v5 can a client half-close a channel, with the message `[255, channel]`.
The `websockets` package implements framing, masking, ping and close, without I/O.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections import deque
from dataclasses import dataclass

from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import SEND_EOF, Protocol, Side, State

from cri_server.streaming.streams import Budget, Inbound, StreamGone
from cri_server.streaming.transport import ConnectionLost, Transport, room_or_hang_up

MESSAGE_LIMIT_BYTES = 1024 * 1024
CLOSE_CHANNEL = 255
PART_BYTES = 2048  # parsed at once: a few hundred of the smallest frames
# Without a limit 170,000 empty frames were handled in one turn of the event loop, which kubelet's
# calls share.
FRAMES_PER_TURN = 100
# `websockets` logs each closed connection; the caller gets the reason as a value.
_QUIET = logging.getLogger("cri_server.streaming.websocket")
_QUIET.setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The properties of a subprotocol. `base64`: data is base64 text, otherwise binary; `closes`:
    the client can half-close a channel; `json_status`: the error channel carries a Status
    object."""

    base64: bool
    closes: bool
    json_status: bool


DIALECTS = {
    "v5.channel.k8s.io": Dialect(base64=False, closes=True, json_status=True),
    "v4.channel.k8s.io": Dialect(base64=False, closes=False, json_status=True),
    "v4.base64.channel.k8s.io": Dialect(base64=True, closes=False, json_status=True),
    "channel.k8s.io": Dialect(base64=False, closes=False, json_status=False),
    "base64.channel.k8s.io": Dialect(base64=True, closes=False, json_status=False),
    "": Dialect(base64=False, closes=False, json_status=False),
}
TUNNEL = "SPDY/3.1+portforward.k8s.io"


class Messages:
    """Sends and receives WebSocket messages over a `Transport`, and is a `Transport` itself. Only
    one task may receive; any task may send."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # The state is OPEN from the start, because `upgrade` has done the handshake.
        self._core = Protocol(Side.SERVER, max_size=MESSAGE_LIMIT_BYTES, logger=_QUIET)
        self._fragments: list[bytes] = []
        self._ready: deque[bytes] = deque()
        self._unread = memoryview(b"")
        self._handled = 0  # frames in this turn

    async def receive(self) -> bytes:
        """Return the next non-empty message; empty bytes at the end. Raises `ConnectionLost`."""
        while not self._ready:
            if self._core.state is not State.OPEN:
                return b""
            if not self._unread:
                data = await self._transport.receive()
                if not data:
                    self._core.receive_eof()
                    return b""
                self._unread = memoryview(bytes(data))
            part, self._unread = self._unread[:PART_BYTES], self._unread[PART_BYTES:]
            self._core.receive_data(bytes(part))
            frames = self._core.events_received()
            for frame in frames:
                self._take(frame)
            self._transport.post(self._out())
            await self._end_turn(len(frames))
        return self._ready.popleft()

    async def _end_turn(self, frames: int) -> None:
        """Count `frames` as handled. After `FRAMES_PER_TURN` of them let other tasks run."""
        self._handled += frames
        if self._handled >= FRAMES_PER_TURN:
            self._handled = 0
            await asyncio.sleep(0)

    def _take(self, frame: object) -> None:
        if not isinstance(frame, Frame) or frame.opcode not in (
            Opcode.BINARY,
            Opcode.TEXT,
            Opcode.CONT,
        ):
            return
        if frame.data:
            self._fragments.append(bytes(frame.data))
        if frame.fin:
            message = b"".join(self._fragments)
            self._fragments.clear()
            if message:
                self._ready.append(message)

    async def send(self, *parts: bytes, text: bool = False) -> None:
        """Send the parts as one message; wait until TCP accepts it. Raises `ConnectionLost`."""
        await self._transport.send(self._encoded(b"".join(parts), text))

    def post(self, data: bytes) -> None:
        """Queue one message and return at once. Raises `ConnectionLost`."""
        self._transport.post(self._encoded(data, text=False))

    def _encoded(self, data: bytes, text: bool) -> bytes:
        try:
            (self._core.send_text if text else self._core.send_binary)(data)
        except WebSocketException:
            raise ConnectionLost("the WebSocket is closed") from None
        return self._out()

    def fail(self, reason: str) -> None:
        """Close the WebSocket after a protocol error of the client."""
        self._leave(CloseCode.PROTOCOL_ERROR, reason)

    def leave(self) -> None:
        """Close the WebSocket normally."""
        # Code 1000 is the only one that a Go client takes for the end of its streams.
        self._leave(CloseCode.NORMAL_CLOSURE, "")

    def _leave(self, code: CloseCode, reason: str) -> None:
        if self._core.state is State.OPEN:
            self._core.send_close(code, reason)
        with contextlib.suppress(ConnectionLost):
            self._transport.post(self._out())

    async def hung_up(self) -> None:
        """Wait until the client has closed its side, even while no task receives."""
        await self._transport.hung_up()

    def probe(self) -> None:
        """Send a pong frame to detect a client that is gone. A pong needs no reply (RFC 6455,
        section 5.5.3)."""
        if self._core.state is State.OPEN:
            self._core.send_pong(b"")
            self._transport.post(self._out())

    def _out(self) -> bytes:
        # SEND_EOF asks for a half-close, which `SocketTransport.close` does once all bytes are
        # sent.
        return b"".join(part for part in self._core.data_to_send() if part is not SEND_EOF)


class WebSocketChannel:
    """One channel of a WebSocket session. The task that owns the channel writes to the client with
    `write`, and reads the client's data from `inbound`. An `Outbound`."""

    def __init__(self, channels: Channels, number: int) -> None:
        self._channels, self.number = channels, number
        self.inbound = Inbound(channels.budget)

    async def write(self, data: bytes) -> None:
        """Send data; wait until TCP accepts it. Raises `StreamGone`."""
        await self._channels.send(self.number, data)

    async def end(self) -> None:
        """Do nothing. In v5 the server may half-close a channel, too, but the Go client does not
        understand that message."""


class Channels:
    """All channels of a WebSocket connection. Only `run` reads from the connection. Data for
    channels that were never requested by `channel` is ignored."""

    def __init__(self, messages: Messages, dialect: Dialect) -> None:
        self.budget = Budget()
        self._messages, self._dialect = messages, dialect
        self._channels: dict[int, WebSocketChannel] = {}
        self._over = False

    def channel(self, number: int) -> WebSocketChannel:
        """Return the channel `number`; create it at the first call. After the end of `run` the
        channel is lost: its readers get `StreamGone`, unless the client had ended its data."""
        channel = self._channels.get(number) or WebSocketChannel(self, number)
        if self._over:
            channel.inbound.lose()
        else:
            self._channels[number] = channel
        return channel

    async def run(self) -> str:
        """Read until the connection ends; return the reason. All channels are lost afterwards."""
        try:
            while message := await self._messages.receive():
                if not self._take(message):
                    self._messages.fail("a message is not base64")
                    return "a message is not base64"
                if self.budget.exhausted and not await room_or_hang_up(
                    self.budget, self._messages, self._messages.probe
                ):
                    return "the peer hung up"
            return "the peer hung up"
        except ConnectionLost as lost:
            return str(lost)
        finally:
            for channel in self._channels.values():
                channel.inbound.lose()
            self._channels.clear()  # breaks the cycle with this object
            self._over = True

    def _take(self, message: bytes) -> bool:
        if self._dialect.base64:
            try:
                number, data = message[0] - ord("0"), base64.b64decode(message[1:], validate=True)
            except ValueError:
                return False
        else:
            number, data = message[0], message[1:]
        if self._dialect.closes and number == CLOSE_CHANNEL:
            closed = self._channels.get(data[0]) if data else None
            if closed is not None:
                closed.inbound.end()
            return True
        channel = self._channels.get(number)
        if channel is not None:
            channel.inbound.feed(data)
        return True

    async def send(self, number: int, data: bytes) -> None:
        try:
            if self._dialect.base64:
                await self._messages.send(b"%d" % number + base64.b64encode(data), text=True)
            else:
                await self._messages.send(bytes((number,)) + data)
        except ConnectionLost:
            raise StreamGone from None
