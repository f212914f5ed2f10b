"""The server's side of an HTTP/2 connection (RFC 9113) as a state machine without I/O: bytes in,
events and bytes out.

`receive` never raises, whatever the peer sends. A stream error resets the stream; a connection
error is reported as the event `Failed`, and all later input is ignored. `Http2Limits` limits the
memory and work that a peer can cause: the size of header blocks, the number of open streams, and
the number of frames of those kinds that cost this side more than the peer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from cri_server.http2 import frames, hpack
from cri_server.http2.events import Data, Drained, Event, Failed, Opened, PeerReady, Reset
from cri_server.http2.fields import Malformed, check
from cri_server.http2.frames import WORD, ErrorCode, Setting
from cri_server.http2.hpack import BadBlock, HpackDecoder
from cri_server.http2.limits import Allowance, Http2Limits
from cri_server.http2.reading import Broken, Reader, check_size, unpadded
from cri_server.http2.sending import FrameSender, Overflow
from cri_server.http2.streams import Block, Http2Stream

RESET_IDS_LIMIT = 1024  # streams that this side has reset, on which the peer may still send

# Tokens of control frames that a client earns with each request and each sent message: clients
# measure their bandwidth with PINGs.
REFUND, REFUND_SENT = 10, 3
SETTINGS_COST = 20  # tokens: SETTINGS may change every open stream
SMALL_UPDATE_BYTES = 1024  # a smaller WINDOW_UPDATE costs a token, too


class Http2Connection:
    """An HTTP/2 connection as a state machine without I/O. Pass received bytes to `receive`, and
    send the result of `data_to_send` after each call of any method."""

    def __init__(
        self, limits: Http2Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or Http2Limits()
        self.failed = self.leaving = False
        # Streams that the peer has closed while the owner still works for them: each `Reset` adds
        # one, the owner subtracts it.
        self.unfinished_streams = 0
        self._streams: dict[int, Http2Stream] = {}
        self._reset: OrderedDict[int, None] = OrderedDict()
        self._last_id = 0
        self._reader = Reader()
        self._settings_received = False
        self._block: Block | None = None
        self._decoder = HpackDecoder()
        self._window_bytes, self._consumed_bytes = self.limits.window_bytes, 0
        self._resets = Allowance(*self.limits.resets, clock)
        self._controls = Allowance(*self.limits.controls, clock)
        self._sender = FrameSender()
        self._prefix = hpack.EMPTY_TABLE
        self._events: list[Event] = []
        self._greet()

    def _greet(self) -> None:
        # SETTINGS is the server's preface and must be its first frame (RFC 9113, section 3.4); it
        # need not wait for the client's.
        self._sender.control(
            frames.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: self.limits.streams,
                    Setting.MAX_HEADER_LIST_SIZE: self.limits.header_list_bytes,
                }
            )
        )
        # SETTINGS_INITIAL_WINDOW_SIZE applies to streams only. The connection's window of 65535
        # bytes can only be changed by WINDOW_UPDATE (section 6.9.2).
        extra = self.limits.window_bytes - frames.WINDOW_BYTES
        if extra > 0:
            self._sender.control(frames.window_update(0, extra))

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that wait for the peer's flow-control windows."""
        return self._sender.queued_bytes

    # -- receiving

    def receive(self, data: bytes) -> list[Event]:
        """Process received bytes; return their events in order. Frames may be split between calls
        anywhere."""
        if self.failed:
            return []
        try:
            for kind, flags, stream_id, body in self._reader.read(data):
                self._frame(kind, flags, stream_id, body)
        except Broken as broken:
            self._fail(broken.code, broken.reason)
        except Overflow:
            self._fail(ErrorCode.FLOW_CONTROL_ERROR, "a window exceeds 2^31-1")
        if self._sender.drained:
            self._note_drained()
        events, self._events = self._events, []
        return events

    def _frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        # No frame of any stream may come between HEADERS and its last CONTINUATION (section 6.10).
        if self._block is not None:
            self._continuation(kind, flags, stream_id, body)
        elif kind == frames.DATA and self._settings_received:
            self._data(flags, stream_id, body)
        elif kind == frames.HEADERS and self._settings_received:
            self._headers(flags, stream_id, body)
        elif kind == frames.SETTINGS:
            self._settings(flags, stream_id, body)
        elif not self._settings_received:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, body)
        elif kind == frames.PING:
            self._ping(flags, stream_id, body)
        elif kind == frames.RST_STREAM:
            self._rst_stream(stream_id, body)
        elif kind == frames.GOAWAY:
            # A client's GOAWAY refuses streams of the server, which are pushes; this side opens
            # none.
            check_size(stream_id == 0 and len(body) >= 2 * WORD.size, "GOAWAY")
            self._charge()
        elif kind == frames.PRIORITY:
            # Priorities are deprecated (section 5.3.2), but older clients send them. They cost a
            # token, because floods of them were an attack (CVE-2019-9513).
            check_size(stream_id != 0 and len(body) == 5, "PRIORITY")
            self._charge()
        elif kind in (frames.PUSH_PROMISE, frames.CONTINUATION):
            raise Broken(ErrorCode.PROTOCOL_ERROR, f"an unexpected frame of type {kind}")
        else:
            self._charge()  # unknown types are ignored (section 4.1)

    # -- requests

    def _data(self, flags: int, stream_id: int, body: bytes) -> None:
        size = len(body)
        # Padding and data of closed streams count, too: the sender has counted them (sections 6.1,
        # 6.9).
        self._consume(size)
        if flags & frames.PADDED:
            body = unpadded(body)
        ended = bool(flags & frames.END_STREAM)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._data_of_no_stream(stream_id)
            return
        if not stream.receiving:
            self._stream_error(stream_id, ErrorCode.STREAM_CLOSED)
            return
        stream.window_bytes -= size
        if stream.window_bytes < 0:
            self._stream_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if stream.left_bytes is not None and not stream.fits(len(body), ended):
            self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        # Flow control does not slow empty frames down (CVE-2019-9518).
        if not body and not ended:
            self._charge()
            return
        self._events.append(Data(stream_id, body, ended))
        if ended:
            self._ended_receiving(stream_id, stream)

    def _consume(self, size: int) -> None:
        """Count `size` received bytes against the connection's receive window, and send
        WINDOW_UPDATE when half of the window is used. Raises Broken for bytes beyond the window."""
        self._window_bytes -= size
        if self._window_bytes < 0:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR, "data beyond the connection's window")
        self._consumed_bytes += size
        # The window is reopened at once, because all input is read; the streams' own windows slow a
        # client down.
        if self._consumed_bytes > self.limits.window_bytes // 2:
            self._sender.control(frames.window_update(0, self._consumed_bytes))
            self._window_bytes += self._consumed_bytes
            self._consumed_bytes = 0

    def _data_of_no_stream(self, stream_id: int) -> None:
        if stream_id in self._reset or self._is_ignored(stream_id):
            return
        self._check_was_open(stream_id, "data for")
        raise Broken(ErrorCode.STREAM_CLOSED, f"data for stream {stream_id}, which has ended")

    def _headers(self, flags: int, stream_id: int, body: bytes) -> None:
        if not stream_id & 1:
            raise Broken(
                ErrorCode.PROTOCOL_ERROR, f"headers of stream {stream_id}, which is not a client's"
            )
        if flags & frames.PADDED:
            body = unpadded(body)
        if flags & frames.WITH_PRIORITY:
            check_size(len(body) >= 5, "HEADERS")
            body = body[5:]
        ended = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._request(stream_id, ended, body)
        else:
            self._block = Block(stream_id, ended, bytearray(body))

    def _continuation(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        block = self._block
        assert block is not None
        if kind != frames.CONTINUATION or stream_id != block.stream_id:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        # Empty CONTINUATION frames add no bytes, so the frames are counted, too: endless ones were
        # a denial of service in many servers (CVE-2023-45288, CVE-2024-27316).
        block.data += body
        block.count += 1
        limits = self.limits
        if len(block.data) > limits.header_block_bytes or block.count > limits.header_frames:
            raise Broken(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of {len(block.data)} bytes in {block.count} frames is too large;"
                f" the limits are {limits.header_block_bytes} bytes and {limits.header_frames}"
                " frames",
            )
        if flags & frames.END_HEADERS:
            self._block = None
            self._request(stream_id, block.ended, bytes(block.data))

    def _request(self, stream_id: int, ended: bool, block: bytes) -> None:
        """Process a complete header block: open its stream, refuse it, or process the block as
        trailers. Raises Broken for a block that cannot be decoded."""
        # A refused block is decoded, too: both sides must keep the same dynamic table (section
        # 4.3).
        try:
            fields = self._decoder.decode(block, self.limits.header_list_bytes)
        except BadBlock as error:
            raise Broken(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from None
        if stream_id <= self._last_id:
            self._trailers(stream_id, ended)
            return
        # GOAWAY has named the last stream that is processed; the client may retry later ones
        # elsewhere (section 6.8).
        if self.leaving:
            return
        self._last_id = stream_id
        self._controls.refund(REFUND)
        # A stream that was reset counts until its handler has ended: reset streams do not count in
        # the protocol, which made rapid resets an attack (CVE-2023-44487). REFUSED_STREAM permits a
        # retry (8.7).
        if len(self._streams) + self.unfinished_streams >= self.limits.streams:
            self._refuse(stream_id, ErrorCode.REFUSED_STREAM)
            return
        try:
            # None means that the list was too long. The stream is opened all the same, so that the
            # owner can answer with a status instead of a reset.
            length = check(fields) if fields is not None else None
            if ended and length:
                raise Malformed
        except Malformed:
            self._refuse(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        self._streams[stream_id] = Http2Stream(self._sender.open(stream_id), not ended, length)
        self._events.append(Opened(stream_id, fields, ended))

    def _trailers(self, stream_id: int, ended: bool) -> None:
        """Process trailers: they end the request's body, and their fields are ignored."""
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id not in self._reset:
                raise Broken(
                    ErrorCode.STREAM_CLOSED, f"headers of stream {stream_id}, which has ended"
                )
        elif not stream.receiving:
            self._stream_error(stream_id, ErrorCode.STREAM_CLOSED)
        elif not ended or stream.left_bytes:
            self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            self._events.append(Data(stream_id, b"", True))
            self._ended_receiving(stream_id, stream)

    def _refuse(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream before it is opened."""
        self._note_reset(stream_id)
        self._sender.control(frames.rst_stream(stream_id, code))
        self._charge_reset()

    def _stream_error(self, stream_id: int, code: ErrorCode) -> None:
        """Reset an open stream after a protocol error on it."""
        self._refuse(stream_id, code)
        self._close(stream_id)
        self._events.append(Reset(stream_id, code))
        self.unfinished_streams += 1

    # -- control

    def _settings(self, flags: int, stream_id: int, body: bytes) -> None:
        if stream_id:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "a SETTINGS frame names a stream")
        if flags & frames.ACK:
            check_size(not body and self._settings_received, "SETTINGS")
            self._charge()
            return
        check_size(len(body) % frames.SETTING.size == 0, "SETTINGS")
        # Each SETTINGS frame has to be answered (CVE-2019-9515).
        self._charge(SETTINGS_COST)
        # Of repeated settings the last value counts (section 6.5.3).
        values = dict(frames.SETTING.iter_unpack(body))
        # The acknowledgement comes first: data that a wider window lets out must not precede it.
        self._sender.control(frames.SETTINGS_ACK)
        self._apply(values)
        if not self._settings_received:
            self._settings_received = True
            self._events.append(PeerReady())

    def _apply(self, values: dict[int, int]) -> None:
        # SETTINGS_HEADER_TABLE_SIZE bounds the table of this side's encoder, which uses none.
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is not 0 or 1")
        frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._sender.frame_bytes)
        if not frames.FRAME_LIMIT_BYTES <= frame_bytes <= frames.FRAME_LIMIT_MAX_BYTES:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
        self._sender.frame_bytes = frame_bytes
        window_bytes = values.get(Setting.INITIAL_WINDOW_SIZE)
        if window_bytes is not None:
            # Overflow, because this error is FLOW_CONTROL_ERROR; those above are PROTOCOL_ERROR
            # (6.5.2).
            if window_bytes > frames.WINDOW_MAX_BYTES:
                raise Overflow
            self._sender.change_initial(window_bytes, [s.out for s in self._streams.values()])

    def _window_update(self, stream_id: int, body: bytes) -> None:
        check_size(len(body) == WORD.size, "WINDOW_UPDATE")
        increment = WORD.unpack(body)[0] & frames.WINDOW_MAX_BYTES
        # Tiny increments make a sender cut its data into tiny frames (CVE-2019-9511).
        if increment < SMALL_UPDATE_BYTES:
            self._charge()
        if stream_id == 0:
            if not increment:
                raise Broken(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE frame has the increment 0")
            self._sender.widen(increment)
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            # The frame may have crossed the end of its stream (section 5.1, "closed").
            self._check_was_open(stream_id, "WINDOW_UPDATE of")
            return
        try:
            if not increment:
                self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
            else:
                self._sender.widen_stream(stream.out, increment)
        except Overflow:
            self._stream_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)

    def _ping(self, flags: int, stream_id: int, body: bytes) -> None:
        if stream_id:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "a PING frame names a stream")
        check_size(len(body) == 8, "PING")
        # Each PING has to be answered (CVE-2019-9512).
        self._charge()
        if not flags & frames.ACK:
            self._sender.control(frames.pong(body))

    def _rst_stream(self, stream_id: int, body: bytes) -> None:
        check_size(len(body) == WORD.size, "RST_STREAM")
        if stream_id in self._streams:
            self._close(stream_id)
            self._events.append(Reset(stream_id, WORD.unpack(body)[0]))
            self.unfinished_streams += 1
            self._charge_reset()
        else:
            self._check_was_open(stream_id, "RST_STREAM of")
            self._charge()

    def _is_ignored(self, stream_id: int) -> bool:
        """Return whether the peer opened the stream after this side's GOAWAY."""
        return self.leaving and stream_id > self._last_id

    def _check_was_open(self, stream_id: int, what: str) -> None:
        if self._is_ignored(stream_id):
            return
        if stream_id == 0 or stream_id > self._last_id or not stream_id & 1:
            raise Broken(
                ErrorCode.PROTOCOL_ERROR, f"{what} stream {stream_id}, which was never opened"
            )

    def _charge(self, tokens: int = 1) -> None:
        if not self._controls.spend(tokens):
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames without requests")

    def _charge_reset(self) -> None:
        if not self._resets.spend():
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM, "too many streams opened and reset")

    # -- the ends of streams and of the connection

    def _ended_receiving(self, stream_id: int, stream: Http2Stream) -> None:
        stream.receiving = False
        if not stream.sending and not stream.out.queued:
            del self._streams[stream_id]

    def _close(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._sender.forget(stream.out)

    def _note_reset(self, stream_id: int) -> None:
        # The peer may have sent frames before it got the reset, and they must be ignored (section
        # 5.1).
        self._reset[stream_id] = None
        if len(self._reset) > RESET_IDS_LIMIT:
            self._reset.popitem(last=False)

    def _note_drained(self) -> None:
        for stream_id in self._sender.drained:
            stream = self._streams.get(stream_id)
            if stream is None or stream.out.queued:
                continue
            if stream.sending:
                self._events.append(Drained(stream_id))
            else:
                self._sent_all(stream_id, stream)
        self._sender.drained.clear()

    def _sent_all(self, stream_id: int, stream: Http2Stream) -> None:
        """Close the stream after its whole reply was sent. If the request is still incomplete, send
        RST_STREAM, which tells the client to stop its upload (section 8.1)."""
        del self._streams[stream_id]
        # NO_ERROR tells the client to stop its upload and keep the reply (section 8.1).
        if stream.receiving:
            self._note_reset(stream_id)
            self._sender.control(frames.rst_stream(stream_id, ErrorCode.NO_ERROR))

    def _fail(self, code: ErrorCode, reason: str) -> None:
        self.lose()
        self._sender.control(frames.goaway(self._last_id, code, reason.encode()))
        self._events.append(Failed(code, reason))

    # -- sending

    def data_to_send(self) -> bytes:
        """Return and remove the frames that may be sent now."""
        return self._sender.take()

    def is_open(self, stream_id: int) -> bool:
        """Return whether headers and data can still be sent on the stream."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.sending

    def send_headers(self, stream_id: int, block: bytes, *, end: bool = False) -> None:
        """Send a header block of literals, which must fit into one frame; `end` closes the stream.
        The stream must be open (`is_open`)."""
        stream = self._streams[stream_id]
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        self._sender.headers(stream.out, block, end=end)
        if end:
            stream.sending = False
            if not stream.out.queued:
                self._sent_all(stream_id, stream)

    def send_data(self, stream_id: int, payload: bytes) -> bool:
        """Send a piece of the body. Return False if the peer's windows made this side queue data;
        the event `Drained` follows when all of it has been sent. The stream must be open
        (`is_open`)."""
        out = self._streams[stream_id].out
        self._controls.refund(REFUND_SENT)
        self._sender.data(out, payload)
        self._sender.drained.clear()
        return not out.queued

    def credit(self, stream_id: int, increment: int) -> None:
        """Widen the stream's receive window, initially 65535 bytes, by `increment`."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.receiving:
            stream.window_bytes += increment
            self._sender.control(frames.window_update(stream_id, increment))

    def lose(self) -> None:
        """Drop all streams and their queued data after the connection has ended."""
        self.failed = True
        for stream_id in list(self._streams):
            self._close(stream_id)
        self._block = None

    def go_away(self) -> None:
        """Refuse new streams with GOAWAY; open ones continue."""
        if not self.leaving:
            self.leaving = True
            self._sender.control(frames.goaway(self._last_id, ErrorCode.NO_ERROR))
