"""WebSocket sessions: channels in messages, or a whole SPDY connection in messages (`TunnelWire`).

A message of the channel protocols is a channel's number and its data: a byte and the bytes, or in
the base64 forms an ASCII digit and base64 text. Channels cannot be half closed, except in v5, where
the message `[255, channel]` says so. Framing, masking, ping and close are the core of the
`websockets` package; this file only moves its bytes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections import deque
from dataclasses import dataclass

from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import SEND_EOF, Protocol, Side, State

from cri_server.streaming.streams import Budget, Inbound, StreamGone
from cri_server.streaming.transport import ConnectionLost, Wire, room_or_hang_up

MESSAGE_LIMIT_BYTES = 1024 * 1024
CLOSE_CHANNEL = 255
PART_BYTES = 2048  # handled in one go: a few hundred of the smallest frames
FRAMES_OF_A_TURN = 100
# The core reports each closed connection; what matters of it reaches the caller as a reason.
_QUIET = logging.getLogger("cri_server.streaming.websocket")
_QUIET.setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a subprotocol means: base64 or binary, and whether a channel can be closed."""

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
    """Whole messages over a `Wire`. One task receives, any may send."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._core = Protocol(Side.SERVER, max_size=MESSAGE_LIMIT_BYTES, logger=_QUIET)
        self._fragments: list[bytes] = []
        self._ready: deque[bytes] = deque()
        self._unread = memoryview(b"")
        self._handled = 0  # frames in this turn

    async def receive(self) -> bytes:
        """The next message that is not empty, nothing at the end. Raises `ConnectionLost`."""
        while not self._ready:
            if self._core.state is not State.OPEN:
                return b""
            if not self._unread:
                data = await self._wire.receive()
                if not data:
                    self._core.receive_eof()
                    return b""
                self._unread = memoryview(bytes(data))
            part, self._unread = self._unread[:PART_BYTES], self._unread[PART_BYTES:]
            self._core.receive_data(bytes(part))
            frames = self._core.events_received()
            for frame in frames:
                self._take(frame)
            self._wire.post(self._out())
            await self._end_turn(len(frames))
        return self._ready.popleft()

    async def _end_turn(self, frames: int) -> None:
        """Let the other tasks run after so many frames, however fast they come."""
        self._handled += frames
        if self._handled >= FRAMES_OF_A_TURN:
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

    async def send(self, data: bytes, *, text: bool = False) -> None:
        """Send one message; waits for TCP. Raises `ConnectionLost`."""
        try:
            (self._core.send_text if text else self._core.send_binary)(data)
        except WebSocketException:
            raise ConnectionLost("the WebSocket is closed") from None
        await self._wire.send(self._out())

    def post(self, data: bytes) -> None:
        """Send one message without waiting. Raises `ConnectionLost`."""
        try:
            self._core.send_binary(data)
        except WebSocketException:
            raise ConnectionLost("the WebSocket is closed") from None
        self._wire.post(self._out())

    def fail(self, reason: str) -> None:
        """Close because of what the peer sent."""
        self._leave(CloseCode.PROTOCOL_ERROR, reason)

    def leave(self) -> None:
        """Close in the normal way: a Go client takes this, and only this, for the end of its
        streams."""
        self._leave(CloseCode.NORMAL_CLOSURE, "")

    def _leave(self, code: CloseCode, reason: str) -> None:
        if self._core.state is State.OPEN:
            self._core.send_close(code, reason)
        try:
            self._wire.post(self._out())
        except ConnectionLost:
            pass

    async def hung_up(self) -> None:
        """Return when the peer has closed its side, also while nobody receives."""
        await self._wire.hung_up()

    def probe(self) -> None:
        """Send something that asks for no answer: a pong without a ping (RFC 6455, 5.5.3)."""
        if self._core.state is State.OPEN:
            self._core.send_pong(b"")
            self._wire.post(self._out())

    def _out(self) -> bytes:
        return b"".join(part for part in self._core.data_to_send() if part is not SEND_EOF)


class TunnelWire:
    """A `Wire` whose bytes travel in messages."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    async def receive(self) -> bytes:
        return await self._messages.receive()

    async def send(self, *parts: bytes) -> None:
        await self._messages.send(b"".join(parts))

    def post(self, data: bytes) -> None:
        self._messages.post(data)

    async def hung_up(self) -> None:
        await self._messages.hung_up()


class Channel:
    """One channel: an `Outbound`, with what the client sends in `inbound`."""

    def __init__(self, channels: Channels, number: int) -> None:
        self._channels, self.number = channels, number
        self.inbound = Inbound(channels.budget)

    async def write(self, data: bytes) -> None:
        """Send data; waits for TCP. Raises `StreamGone`."""
        await self._channels.send(self.number, data)

    async def end(self) -> None:
        """Say that no more will be written, where the subprotocol can say it. Raises `StreamGone`."""
        await self._channels.end(self.number)


class Channels:
    """All channels of a connection. `run` is the only reader; channels that nobody asked for are
    skipped."""

    def __init__(self, messages: Messages, dialect: Dialect) -> None:
        self.budget = Budget()
        self._messages, self._dialect = messages, dialect
        self._channels: dict[int, Channel] = {}
        self._over = False

    def channel(self, number: int) -> Channel:
        """Make a channel; before `run`. Afterwards it is a lost one."""
        found = self._channels.get(number) or Channel(self, number)
        if self._over:
            found.inbound.lose()
        else:
            self._channels[number] = found
        return found

    async def run(self) -> str:
        """Read until the connection is over; why it is, in words. All channels are lost then."""
        try:
            while message := await self._messages.receive():
                if not self._take(message):
                    self._messages.fail("not base64")
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
            self._channels.clear()  # they know this connection
            self._over = True

    def _take(self, message: bytes) -> bool:
        if self._dialect.base64:
            try:
                number, data = message[0] - ord("0"), base64.b64decode(message[1:], validate=True)
            except binascii.Error:
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

    async def end(self, number: int) -> None:
        """v5 lets both sides close a channel, but its Go client knows the message only in the other
        direction."""
