"""Multiplexes streams over one SPDY connection: connects the state machine of `spdy.connection` to
a `Transport`.

Only `run` reads from the transport. It passes data to the streams, and pauses while they have too
much unread data. It sends ping replies and stream resets without waiting for the client to read
these frames. The task that owns a stream writes the stream's data.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from cri_server.streaming.spdy.connection import (
    ConnectionFailed,
    Event,
    SpdyConnection,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamReset,
)
from cri_server.streaming.spdy.frames import Status
from cri_server.streaming.spdy.headers import Headers
from cri_server.streaming.streams import Budget, Inbound, StreamGone
from cri_server.streaming.transport import ConnectionLost, Transport, room_or_hang_up

# All sessions and kubelet's calls share the event loop: without a limit 40,000 refused streams were
# handled in one turn, which took seconds.
FRAMES_PER_TURN = 100


class MultiplexedStream:
    """One SPDY stream. The task that owns the stream writes to the client with `write` (of
    `Outbound`), and reads the client's data from `inbound`."""

    def __init__(self, multiplexer: Multiplexer, stream_id: int, headers: Headers) -> None:
        self._multiplexer, self.stream_id, self.headers = multiplexer, stream_id, headers
        self.inbound = Inbound(multiplexer.budget)
        self.gone = asyncio.Event()

    def header(self, name: str) -> str:
        """Return the first value of the stream's header `name`; empty if the header is missing."""
        return self.headers.get(name, [""])[0]

    async def write(self, data: bytes) -> None:
        """Send data; wait until TCP accepts it. Raises `StreamGone`."""
        await self._multiplexer.send(self, data, fin=False)

    async def end(self) -> None:
        """Half-close the stream. Raises `StreamGone`."""
        await self._multiplexer.send(self, b"", fin=True)

    async def finish(self) -> None:
        """Half-close the stream, and discard what the client still sends."""
        # A Go peer reports a `reset` as an error.
        with contextlib.suppress(StreamGone):
            await self.end()
        self.inbound.discard()
        self._multiplexer.forget(self)

    def reset(self, status: Status = Status.CANCEL) -> None:
        """Reset the stream, unless it has ended."""
        self._multiplexer.reset(self, status)

    def lose(self) -> None:
        """Mark the stream as lost, because the client has reset it or has disconnected."""
        self.gone.set()
        self.inbound.lose()


class Multiplexer:
    """All streams of a SPDY connection. `on_open` is called with each stream that the client has
    opened, after the stream was accepted."""

    def __init__(
        self,
        transport: Transport,
        on_open: Callable[[MultiplexedStream], None],
        streams_limit: int = 1024,
    ) -> None:
        self.budget = Budget()
        self._transport, self._on_open = transport, on_open
        self._core = SpdyConnection(streams_limit)
        self._handled_before = 0  # this turn
        self._streams: dict[int, MultiplexedStream] = {}

    async def run(self) -> str:
        """Read until the connection ends; return the reason. All streams are lost afterwards."""
        try:
            while data := await self._transport.receive():
                rest = memoryview(data)
                while len(rest):
                    events, rest = self._core.receive_some(rest, FRAMES_PER_TURN)
                    for event in events:
                        if isinstance(event, ConnectionFailed):
                            return event.reason
                        self._handle(event)
                    self._post()
                    await self._end_turn()
                if self.budget.exhausted and not await self._room():
                    return "the peer hung up"
            return "the peer hung up"
        except ConnectionLost as lost:
            return str(lost)
        finally:
            self._post_last()
            for stream in self._streams.values():
                stream.lose()
            # The streams refer to this connection; without the cycle their memory is freed now
            # instead of at the next garbage collection.
            self._streams.clear()
            self._on_open = MultiplexedStream.lose

    async def _end_turn(self) -> None:
        """Let other tasks run each time that `FRAMES_PER_TURN` frames were handled."""
        if self._core.frames_handled - self._handled_before >= FRAMES_PER_TURN:
            self._handled_before = self._core.frames_handled
            await asyncio.sleep(0)

    async def _room(self) -> bool:
        """Wait until the streams have read enough data that more may be buffered. Return False if
        the client disconnects first."""
        return await room_or_hang_up(self.budget, self._transport, self._probe)

    def _probe(self) -> None:
        self._core.probe()
        self._post()

    def _handle(self, event: Event) -> None:
        match event:
            case StreamOpened(stream_id, headers, fin):
                stream = MultiplexedStream(self, stream_id, headers)
                self._streams[stream_id] = stream
                # The reply precedes what the owner writes: a Go peer drops data before SYN_REPLY.
                self._core.reply(stream_id)
                if fin:
                    stream.inbound.end()
                self._on_open(stream)
            case StreamData(stream_id, data, fin):
                target = self._streams.get(stream_id)
                if target is None:
                    return
                target.inbound.feed(data)
                if fin:
                    target.inbound.end()
                    self._forget_if_over(target)
            case StreamReset(stream_id, _):
                lost = self._streams.pop(stream_id, None)
                if lost is not None:
                    lost.lose()

    def _forget_if_over(self, stream: MultiplexedStream) -> None:
        if not self._core.is_open(stream.stream_id):
            self._streams.pop(stream.stream_id, None)

    async def send(self, stream: MultiplexedStream, data: bytes, *, fin: bool) -> None:
        try:
            await self._transport.send(
                self._core.data_head(stream.stream_id, len(data), fin=fin), data
            )
        except (StreamClosed, ConnectionLost):
            raise StreamGone from None
        if fin:
            self._forget_if_over(stream)

    def reset(self, stream: MultiplexedStream, status: Status) -> None:
        self._core.reset(stream.stream_id, status)
        self._streams.pop(stream.stream_id, None)
        stream.lose()
        self._post_last()

    def forget(self, stream: MultiplexedStream) -> None:
        """Drop a stream, so that it no longer counts for the limit of streams. Further frames of
        the client on this stream are ignored."""
        self._core.forget(stream.stream_id)
        self._streams.pop(stream.stream_id, None)

    def leave(self) -> None:
        """Send GOAWAY before the connection is closed. Streams that the client opens afterwards are
        refused."""
        self._core.go_away()
        self._post_last()

    def _post(self) -> None:
        data = self._core.data_to_send()
        if data:
            self._transport.post(data)

    def _post_last(self) -> None:
        with contextlib.suppress(ConnectionLost):
            self._post()
