"""The client's side of a SPDY/3.1 connection, as in kubectl; the product has only the server's
side."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

from cri_server.streaming.multiplex import MultiplexedStream, Multiplexer
from cri_server.streaming.spdy import connection, frames
from cri_server.streaming.spdy.connection import Event, SpdyConnection, StreamData
from cri_server.streaming.spdy.frames import FIN, Status, Type
from cri_server.streaming.spdy.headers import Headers
from cri_server.streaming.streams import StreamGone
from cri_server.streaming.transport import Transport


@dataclass(frozen=True, slots=True)
class Replied:
    """The server has accepted a stream."""

    stream_id: int
    headers: Headers
    fin: bool


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply to a ping."""

    ping_id: int


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The server accepts no more streams and has ignored those after `last_stream_id`."""

    last_stream_id: int
    status: int


ClientEvent = Event | Replied | Pong | GoneAway


def syn_stream(stream_id: int, block: bytes, *, fin: bool = False) -> bytes:
    """Return a SYN_STREAM frame; `block`: the compressed headers."""
    # no associated stream, highest priority
    head = struct.pack(">IIBB", stream_id, 0, 0, 0)
    return frames.control(Type.SYN_STREAM, FIN if fin else 0, head + block)


class SpdyClient(SpdyConnection):
    """The client's state: it opens streams and sends pings, and accepts no stream."""

    def __init__(self) -> None:
        super().__init__()
        self._next_stream = self._next_ping = 1

    def open(self, headers: Headers, *, fin: bool = False) -> int:
        """Open a stream and return its id."""
        stream_id = self._next_stream
        self._next_stream += 2
        self._streams[stream_id] = connection._Stream(receiving=True, sending=not fin)
        self._out.append(syn_stream(stream_id, self._packer.pack(headers), fin=fin))
        return stream_id

    def ping(self) -> int:
        """Send a ping and return the id of its `Pong`."""
        ping_id = self._next_ping
        self._next_ping += 2
        self._out.append(frames.ping(ping_id))
        return ping_id

    def receive(self, data: bytes | bytearray | memoryview) -> list[ClientEvent]:  # type: ignore[override]
        """Process received bytes; return their events in order."""
        return [*super().receive(data)]

    def _was_open(self, stream_id: int) -> bool:
        return stream_id % 2 == 1 and stream_id < self._next_stream

    def _control(self, kind: int, flags: int, body: bytes, events: list[ClientEvent]) -> None:  # type: ignore[override]
        first = frames.WORD.unpack_from(body)[0] if len(body) >= 4 else 0
        if kind == Type.SYN_REPLY:
            events.append(Replied(first, self._unpack(body[4:]), bool(flags & FIN)))
            if flags & FIN and first in self._streams:
                self._ended_receiving(first, self._streams[first])
        elif kind == Type.PING:
            events.append(Pong(first))
        elif kind == Type.GOAWAY:
            events.append(GoneAway(*frames.TWO_WORDS.unpack(body)))
        else:
            super()._control(kind, flags, body, events)  # type: ignore[arg-type]


class ClientMultiplexer(Multiplexer):
    """The streams of a client's connection."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport, lambda stream: stream.reset(Status.REFUSED_STREAM))
        self._core: SpdyClient = SpdyClient()
        self._replies: dict[int, asyncio.Event] = {}

    async def open(self, headers: Headers) -> MultiplexedStream:
        """Open a stream and wait until the server accepts it. Raises `StreamGone`."""
        stream = MultiplexedStream(self, self._core.open(headers), headers)
        self._streams[stream.stream_id] = stream
        replied = self._replies[stream.stream_id] = asyncio.Event()
        self._post()
        waits = [asyncio.create_task(event.wait()) for event in (replied, stream.gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if stream.gone.is_set():
            raise StreamGone
        return stream

    def _handle(self, event: ClientEvent) -> None:  # type: ignore[override]
        if isinstance(event, Replied | StreamData):
            self._replies[event.stream_id].set()
        if isinstance(event, Replied):
            if event.fin:
                super()._handle(StreamData(event.stream_id, b"", True))
        elif not isinstance(event, Pong | GoneAway):
            super()._handle(event)

    async def _room(self) -> bool:
        # A server closes the connection after its last data, of which a part is still to be read.
        await self.budget.room()
        return True
