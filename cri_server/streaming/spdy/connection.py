"""The server's side of a SPDY/3.1 connection, as a state machine without I/O and clock: bytes in,
events and bytes out. The server opens no streams and sends no pings.

`receive` never raises, whatever the client sends. An invalid frame on a stream resets that stream.
After an error of framing, compression or stream ids the two sides disagree on the state: the caller
gets `ConnectionFailed` and a GOAWAY frame to send, and all later input is ignored.

Memory is limited: a control frame of at most `CONTROL_LIMIT_BYTES` is buffered whole, data is
passed on as it comes, and a stream is dropped when both directions have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cri_server.streaming.spdy import frames
from cri_server.streaming.spdy.frames import (
    FIN,
    HEAD,
    HEAD_BYTES,
    TWO_WORDS,
    WORD,
    Parting,
    Status,
    Type,
)
from cri_server.streaming.spdy.headers import Headers, MalformedHeaders, Packer, Unpacker

CONTROL_LIMIT_BYTES = 64 * 1024
STREAMS_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """Event: the client has opened a stream. The caller answers with `SpdyConnection.reply` or
    `reset`. `fin`: the client will send no data on the stream."""

    stream_id: int
    headers: Headers
    fin: bool


@dataclass(frozen=True, slots=True)
class StreamData:
    """Event: a data frame's body, or a part of it. `fin`: this is the stream's last data, which may
    be empty."""

    stream_id: int
    data: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class StreamReset:
    """Event: a stream was reset. `status`: a `frames.Status`, or an unknown number that the client
    has sent."""

    stream_id: int
    status: int


@dataclass(frozen=True, slots=True)
class ConnectionFailed:
    """Event: the connection has failed. `data_to_send` returns the GOAWAY frame."""

    reason: str


Event = StreamOpened | StreamData | StreamReset | ConnectionFailed


class StreamClosed(Exception):
    """The caller cannot send on a stream that this side has closed, or that was reset."""


class _Broken(Exception):
    """A connection error in received bytes, with its reason."""


@dataclass(slots=True)
class _Stream:
    receiving: bool
    sending: bool


@dataclass(slots=True)
class SpdyConnection:
    """The state of one SPDY connection. `data_to_send` returns frames to send, but not the bodies
    of data frames, which the caller has."""

    streams_limit: int = STREAMS_LIMIT
    failed: bool = False
    frames_handled: int = 0
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _out: list[bytes] = field(default_factory=list)
    _packer: Packer = field(default_factory=Packer)
    _unpacker: Unpacker = field(default_factory=Unpacker)
    _partial: bytearray = field(default_factory=bytearray)
    _data_stream: int = 0
    _data_left: int = 0
    _data_fin: bool = False
    _last_received: int = 0
    _leaving: bool = False

    # ---- receiving ----

    def receive(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Process received bytes; return their events in order. Frames may be split between calls
        anywhere."""
        return self.receive_some(memoryview(data), len(data))[0]

    def receive_some(self, view: memoryview, frames_limit: int) -> tuple[list[Event], memoryview]:
        """Process at most `frames_limit` frames of received bytes; return their events and the
        remaining bytes. The limit lets other tasks run, because even a frame of eight bytes costs
        work."""
        events: list[Event] = []
        limit = self.frames_handled + frames_limit
        try:
            while len(view) and not self.failed and self.frames_handled < limit:
                view = self._body(view, events) if self._data_left else self._frame(view, events)
        except _Broken as broken:
            self.failed = True
            self._streams.clear()
            self._partial.clear()
            self._out.append(frames.goaway(self._last_received, Parting.PROTOCOL_ERROR))
            events.append(ConnectionFailed(str(broken)))
        return events, view

    def _body(self, view: memoryview, events: list[Event]) -> memoryview:
        """Process bytes of a data frame's body; return the bytes after the body."""
        size = min(len(view), self._data_left)
        self._data_left -= size
        fin = self._data_fin and not self._data_left
        stream = self._streams.get(self._data_stream)
        if stream is not None and stream.receiving:
            events.append(StreamData(self._data_stream, bytes(view[:size]), fin))
            if fin:
                self._ended_receiving(self._data_stream, stream)
        return view[size:]

    def _frame(self, view: memoryview, events: list[Event]) -> memoryview:
        """Process a frame's header, and for a control frame also the body; return the bytes after
        the processed ones. An incomplete header or control frame is buffered until the next call.
        """
        self.frames_handled += 1
        view = self._collect(view, HEAD_BYTES)
        if len(self._partial) < HEAD_BYTES:
            return view
        first, second = HEAD.unpack_from(self._partial)
        flags, length = second >> 24, second & frames.LENGTH_MAX
        if not first >> 31:
            self._partial.clear()
            self._data_head(first, flags, length, events)
            return view
        if first >> 16 != frames.CONTROL << 8 | frames.VERSION:
            raise _Broken(f"a frame has version {first >> 16 & 0x7FFF}")
        if length > CONTROL_LIMIT_BYTES:
            raise _Broken(f"control frame of {length} bytes is too large")
        view = self._collect(view, HEAD_BYTES + length)
        if len(self._partial) == HEAD_BYTES + length:
            body = bytes(self._partial[HEAD_BYTES:])
            self._partial.clear()
            self._control(first & 0xFFFF, flags, body, events)
        return view

    def _collect(self, view: memoryview, size: int) -> memoryview:
        missing = max(0, size - len(self._partial))
        self._partial += view[:missing]
        return view[missing:]

    def _data_head(self, stream_id: int, flags: int, length: int, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None and not self._was_open(stream_id):
            raise _Broken(f"data for stream {stream_id}, which was never opened")
        if stream is not None and not stream.receiving:
            self.reset(stream_id, Status.STREAM_ALREADY_CLOSED)
            events.append(StreamReset(stream_id, Status.STREAM_ALREADY_CLOSED))
        self._data_stream, self._data_left, self._data_fin = stream_id, length, bool(flags & FIN)
        if not length and self._data_fin and stream is not None and stream.receiving:
            events.append(StreamData(stream_id, b"", True))
            self._ended_receiving(stream_id, stream)

    def _was_open(self, stream_id: int) -> bool:
        return _is_clients(stream_id) and stream_id <= self._last_received

    def _control(self, kind: int, flags: int, body: bytes, events: list[Event]) -> None:
        # SETTINGS and WINDOW_UPDATE are ignored, because the Go peers have no flow control (see
        # spdy/__init__.py), and unknown types, because the draft requires it.
        match kind:
            case Type.SYN_STREAM:
                self._syn_stream(flags, body, events)
            case Type.SYN_REPLY | Type.HEADERS:
                self._more_headers(flags, body, events)
            case Type.RST_STREAM:
                stream_id, status = _two_words(body, "RST_STREAM")
                if self._streams.pop(stream_id, None) is not None:
                    events.append(StreamReset(stream_id, status))
            case Type.PING:
                self._ping(body)
            case Type.GOAWAY:
                _two_words(body, "GOAWAY")  # it would refuse streams of the server

    def _syn_stream(self, flags: int, body: bytes, events: list[Event]) -> None:
        if len(body) < 10:
            raise _Broken("SYN_STREAM is too short")
        first, associated = TWO_WORDS.unpack_from(body)
        stream_id = first & frames.STREAM_ID_MAX
        # A refused stream is unpacked, too: all blocks of a direction share one zlib state.
        headers = self._unpack(body[10:])
        if not _is_clients(stream_id) or stream_id <= self._last_received:
            raise _Broken(f"stream id {stream_id} after {self._last_received}")
        self._last_received = stream_id
        if flags & frames.UNIDIRECTIONAL or associated & frames.STREAM_ID_MAX:
            self._out.append(frames.rst_stream(stream_id, Status.PROTOCOL_ERROR))
        # REFUSED_STREAM says that nothing was processed, so that the client may retry.
        elif self._leaving or len(self._streams) >= self.streams_limit:
            self._out.append(frames.rst_stream(stream_id, Status.REFUSED_STREAM))
        else:
            self._streams[stream_id] = _Stream(receiving=not flags & FIN, sending=True)
            events.append(StreamOpened(stream_id, headers, bool(flags & FIN)))

    def _more_headers(self, flags: int, body: bytes, events: list[Event]) -> None:
        if len(body) < WORD.size:
            raise _Broken("a frame with headers is too short")
        stream_id = WORD.unpack_from(body)[0] & frames.STREAM_ID_MAX
        self._unpack(body[WORD.size :])
        stream = self._streams.get(stream_id)
        if stream is not None and stream.receiving and flags & FIN:
            events.append(StreamData(stream_id, b"", True))
            self._ended_receiving(stream_id, stream)

    def _unpack(self, block: bytes) -> Headers:
        try:
            return self._unpacker.unpack(block)
        except MalformedHeaders as error:
            raise _Broken(str(error)) from None

    def _ping(self, body: bytes) -> None:
        if len(body) != WORD.size:
            raise _Broken("PING with a wrong size")
        ping_id = int(WORD.unpack(body)[0])
        # A client's pings are odd, a server's even; only foreign ones are returned (draft, section
        # 2.6.5).
        if _is_clients(ping_id):
            self._out.append(frames.ping(ping_id))

    def _ended_receiving(self, stream_id: int, stream: _Stream) -> None:
        stream.receiving = False
        if not stream.sending:
            self._streams.pop(stream_id, None)

    # ---- sending ----

    def data_to_send(self) -> bytes:
        """Return the frames that were queued since the last call. The caller sends them in order
        and before any later data."""
        out = b"".join(self._out)
        self._out.clear()
        return out

    def reply(self, stream_id: int) -> None:
        """Accept a stream that the client has opened."""
        if stream_id in self._streams:
            self._out.append(frames.syn_reply(stream_id, self._packer.pack({})))

    def data_head(self, stream_id: int, length: int, *, fin: bool = False) -> bytes:
        """Return the header of a data frame with a body of `length` bytes. The caller sends
        `data_to_send()`, this header and the body, in this order.

        Raises `StreamClosed` if either side has reset the stream, or this side has ended it.
        """
        stream = self._streams.get(stream_id)
        if stream is None or not stream.sending:
            raise StreamClosed(stream_id)
        if fin:
            stream.sending = False
            if not stream.receiving:
                del self._streams[stream_id]
        return frames.data_head(stream_id, length, fin)

    def is_open(self, stream_id: int) -> bool:
        """Return whether either side can still send on the stream."""
        return stream_id in self._streams

    def reset(self, stream_id: int, status: Status) -> None:
        """Reset a stream; does nothing if the stream has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self._out.append(frames.rst_stream(stream_id, status))

    def forget(self, stream_id: int) -> None:
        """Drop a stream that this side has closed. Further frames of the client on this stream are
        ignored."""
        self._streams.pop(stream_id, None)

    def probe(self) -> None:
        """Queue an empty data frame on an open stream for `data_to_send`. The frame has no effect
        on the client and needs no reply. Does nothing when no stream is open for sending."""
        for stream_id, stream in self._streams.items():
            if stream.sending:
                self._out.append(frames.data_head(stream_id, 0, False))
                return

    def go_away(self) -> None:
        """Queue a GOAWAY frame for `data_to_send`; a second call does nothing. Further streams of
        the client are refused, open streams continue."""
        if not self._leaving:
            self._leaving = True
            self._out.append(frames.goaway(self._last_received, Parting.OK))


def _is_clients(number: int) -> bool:
    """Return whether the client has chosen `number`, the id of a stream or ping. The client's ids
    are odd."""
    return number % 2 == 1


def _two_words(body: bytes, name: str) -> tuple[int, int]:
    if len(body) != TWO_WORDS.size:
        raise _Broken(f"{name} with a wrong size")
    first, second = TWO_WORDS.unpack(body)
    return first & frames.STREAM_ID_MAX, second
