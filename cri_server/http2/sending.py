"""Sends frames in order, and data within the peer's flow-control windows (RFC 9113, section 5.2).

Control frames are sent at once. Data beyond the windows is queued on its stream, followed by its
trailers. If only the connection's window blocks a stream, the stream is in the ready queue. When
this window is widened, only streams in the ready queue are visited.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cri_server.http2 import frames
from cri_server.http2.frames import DATA, END_HEADERS, END_STREAM, HEAD, HEADERS

Chunk = bytes | memoryview


class Overflow(Exception):
    """A flow-control window exceeds 2^31-1."""


@dataclass(eq=False, slots=True)
class Outgoing:
    """A stream's sending half."""

    stream_id: int
    window_bytes: int
    queued: deque[memoryview] | None = None
    trailers: bytes | None = None  # sent after the queued data; they end the stream
    ready: bool = False  # whether it is in the ready queue


class FrameSender:
    """Collects frames for `take`. `queued_bytes`: size of the data that waits for the peer's
    flow-control windows."""

    __slots__ = (
        "_initial_bytes",
        "_out",
        "_ready",
        "_window_bytes",
        "drained",
        "frame_bytes",
        "queued_bytes",
    )

    def __init__(self) -> None:
        self._out: list[Chunk] = []
        self._ready: deque[Outgoing] = deque()
        self._window_bytes = self._initial_bytes = frames.WINDOW_BYTES
        self.frame_bytes = frames.FRAME_LIMIT_BYTES
        self.queued_bytes = 0
        # Streams whose queued data has all been sent since the owner last cleared this list.
        self.drained: list[int] = []

    def take(self) -> bytes:
        """Return and remove all frames that may be sent now."""
        out = b"".join(self._out)
        self._out.clear()
        return out

    def control(self, frame: bytes) -> None:
        self._out.append(frame)

    def open(self, stream_id: int) -> Outgoing:
        return Outgoing(stream_id, self._initial_bytes)

    def headers(self, stream: Outgoing, block: bytes, *, end: bool) -> None:
        """Send a header block, which must fit into one frame; `end` closes the stream."""
        # Only DATA is flow-controlled (section 5.2.1), so trailers sent now would overtake the
        # queue.
        if stream.queued:
            assert end and stream.trailers is None
            stream.trailers = block
            return
        flags = END_HEADERS | END_STREAM if end else END_HEADERS
        length = len(block)
        self._out.append(
            HEAD.pack(length >> 8, length & 0xFF, HEADERS, flags, stream.stream_id) + block
        )

    def data(self, stream: Outgoing, payload: bytes) -> None:
        """Send a part of the body. Queues the bytes that exceed the flow-control windows."""
        length = len(payload)
        if (
            not stream.queued
            and length <= stream.window_bytes
            and length <= self._window_bytes
            and length <= self.frame_bytes
        ):
            stream.window_bytes -= length
            self._window_bytes -= length
            self._out.append(HEAD.pack(length >> 8, length & 0xFF, DATA, 0, stream.stream_id))
            self._out.append(payload)
            return
        if stream.queued is None:
            stream.queued = deque()
        # A frame is cut from a view: slices of bytes would copy the rest of the payload each time.
        stream.queued.append(memoryview(payload))
        self.queued_bytes += length
        self._enqueue(stream)
        self._pump()

    def forget(self, stream: Outgoing) -> None:
        """Drop the queue of a stream that was reset."""
        if stream.queued:
            self.queued_bytes -= sum(map(len, stream.queued))
            stream.queued.clear()
        stream.trailers = None

    # -- the peer's windows

    def widen(self, increment: int) -> None:
        """Widen the connection's window. Raises Overflow."""
        self._window_bytes += increment
        if self._window_bytes > frames.WINDOW_MAX_BYTES:
            raise Overflow
        self._pump()

    def widen_stream(self, stream: Outgoing, increment: int) -> None:
        """Widen a stream's window. Raises Overflow."""
        stream.window_bytes += increment
        if stream.window_bytes > frames.WINDOW_MAX_BYTES:
            raise Overflow
        if stream.queued:
            self._enqueue(stream)
            self._pump()

    def change_initial(self, window_bytes: int, streams: list[Outgoing]) -> None:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE, which shifts the windows of all open streams, even
        below 0. Raises Overflow."""
        difference = window_bytes - self._initial_bytes
        self._initial_bytes = window_bytes
        for stream in streams:
            stream.window_bytes += difference
            if stream.window_bytes > frames.WINDOW_MAX_BYTES:
                raise Overflow
            if stream.queued:
                self._enqueue(stream)
        self._pump()

    # -- the queues

    def _enqueue(self, stream: Outgoing) -> None:
        if not stream.ready and stream.window_bytes > 0:
            stream.ready = True
            self._ready.append(stream)

    def _pump(self) -> None:
        """Send frames of the ready streams, round-robin, until the connection's window is used
        up."""
        while self._ready and self._window_bytes > 0:
            stream = self._ready.popleft()
            stream.ready = False
            if not stream.queued or stream.window_bytes <= 0:
                continue
            self._frame(stream, stream.queued)
            if stream.queued:
                self._enqueue(stream)
            else:
                self._finish(stream)

    def _frame(self, stream: Outgoing, queued: deque[memoryview]) -> None:
        first = queued[0]
        size = min(len(first), stream.window_bytes, self._window_bytes, self.frame_bytes)
        if size == len(first):
            queued.popleft()
        else:
            queued[0] = first[size:]
        stream.window_bytes -= size
        self._window_bytes -= size
        self.queued_bytes -= size
        self._out.append(frames.head(size, DATA, 0, stream.stream_id))
        self._out.append(first[:size])

    def _finish(self, stream: Outgoing) -> None:
        self.drained.append(stream.stream_id)
        if stream.trailers is not None:
            block, stream.trailers = stream.trailers, None
            self.headers(stream, block, end=True)
