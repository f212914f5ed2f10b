"""A gRPC client over a unix socket, for commands that make a few calls and exit. It speaks HTTP/2
(RFC 9113) with blocking reads and writes.

It replaces the gRPC library, whose import takes 80 ms of CPU, more than the imports of all other
modules of `ps`. A connection carries one call at a time and is reused for the next call. Several
threads may make calls at the same time.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from cri_server.http2 import frames, hpack
from cri_server.http2.frames import Setting
from cri_server.http2.sending import FrameSender, Overflow
from cri_server.rpc.codes import Code

Item = TypeVar("Item")

CONNECT_TIMEOUT_S = 5.0  # also for the server's settings, its first frame
MESSAGE_LIMIT_BYTES = 32 << 20
HEADERS_LIMIT_BYTES = 64 << 10
WINDOW_BYTES = 1 << 20  # what the server may send before the client has read it
READ_BYTES = 1 << 16
TIMEOUT_LIMIT_MS = 99_999_999  # eight digits (grpc/doc/PROTOCOL-HTTP2.md)
BY_HTTP_STATUS = {  # grpc/doc/http-grpc-status-mapping.md
    400: Code.INTERNAL,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}
BY_RESET = {
    frames.ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
    frames.ErrorCode.CANCEL: Code.CANCELLED,
    frames.ErrorCode.ENHANCE_YOUR_CALM: Code.RESOURCE_EXHAUSTED,
    frames.ErrorCode.INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
}
_SETTINGS = frames.PREFACE + frames.settings(
    {
        Setting.ENABLE_PUSH: 0,
        Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: HEADERS_LIMIT_BYTES,
    }
)
_GREETING = _SETTINGS + frames.window_update(0, WINDOW_BYTES - frames.WINDOW_BYTES)
# gRPC's libraries send `localhost` for unix sockets, whose path would be no valid authority.
_PSEUDO_FIELDS = b"".join(
    hpack.literal(name, value)
    for name, value in ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost"))
)
_FIELDS = b"".join(
    hpack.literal(name, value)
    for name, value in (
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"pyrunc-cri"),
    )
)


class CallError(Exception):
    """A failed call. `code`: gRPC's code; `details`: the message of the server or the transport."""

    def __init__(self, code: Code, details: str) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = details


class Channel:
    """Makes gRPC calls to the server on the unix socket `path`. Keeps idle connections for later
    calls."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle = deque[_Connection]()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def unary(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        """Send `request` and return the only message of the reply. `path`: the gRPC method. Raises
        CallError."""
        messages = list(self.stream(path, request, bytes, timeout_s))
        if len(messages) != 1:
            raise CallError(Code.INTERNAL, f"the server sent {len(messages)} messages, not one")
        return messages[0]

    def stream(
        self,
        path: str,
        request: bytes,
        decode: Callable[[bytes], Item],
        timeout_s: float | None = None,
    ) -> Iterator[Item]:
        """Send `request` and yield the decoded messages of the reply. Closing the iterator early
        cancels the call. Raises CallError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        connection = self._connect(deadline)
        try:
            connection.begin(path, request, timeout_s)
            for message in connection.messages():
                yield decode(message)
        except TimeoutError:
            raise CallError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except OSError as error:
            raise CallError(Code.UNAVAILABLE, error.strerror or str(error)) from None
        except Overflow:
            raise CallError(Code.UNAVAILABLE, "the server's window exceeds 2^31-1") from None
        finally:
            if connection.ended and connection.intact:
                self._idle.append(connection)
            else:
                connection.close()

    def _connect(self, deadline: float | None) -> _Connection:
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                connection.deadline = deadline
                if connection.usable():
                    return connection
                connection.close()
        try:
            return _Connection(self._path, deadline)
        except OSError as error:
            raise CallError(Code.UNAVAILABLE, error.strerror or str(error)) from None


class _Connection:
    """A connection that carries one call at a time. Its methods raise CallError, TimeoutError at
    the call's deadline, and OSError."""

    def __init__(self, path: str, deadline: float | None) -> None:
        self.deadline = deadline
        self.intact = True
        self.ended = True  # no call is in progress
        self._stream_id = -1
        self._greeted = False  # the server's settings have arrived
        self._received = bytearray()
        self._decoder = hpack.HpackDecoder()
        self._unread_bytes = 0  # read, but not yet returned to the server's windows
        self._sender = FrameSender()
        self._stream = self._sender.open(self._stream_id)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise
        self._greet_until = time.monotonic() + CONNECT_TIMEOUT_S
        self._sender.control(_GREETING)

    def close(self) -> None:
        """Close the socket, which cancels a running call on the server."""
        self._socket.close()

    def usable(self) -> bool:
        """Return whether the connection can carry another call. Reads pending frames first, because
        the server may have announced that it closes the connection."""
        try:
            while self._received or select.select([self._socket], [], [], 0)[0]:
                # The server's GOAWAY may lie unread in the socket, and a request after it would be
                # lost.
                kind, flags, stream_id, body = self._frame()
                self._housekeeping(kind, flags, stream_id, body)
        except (CallError, OSError, Overflow):
            return False
        return self.intact

    def begin(self, path: str, request: bytes, timeout_s: float | None) -> None:
        """Send the request of a new call. `timeout_s` is passed to the server as grpc-timeout."""
        self._stream_id += 2
        self.ended = False
        self._stream = self._sender.open(self._stream_id)
        block = _PSEUDO_FIELDS + hpack.literal(b":path", path.encode()) + _FIELDS
        if timeout_s is not None:
            # A timeout of 0 ms would have passed before the server reads it.
            milliseconds = min(TIMEOUT_LIMIT_MS, max(1, round(timeout_s * 1000)))
            block += hpack.literal(b"grpc-timeout", b"%dm" % milliseconds)
        self._sender.headers(self._stream, block, end=False)
        self._sender.data(self._stream, b"\0" + len(request).to_bytes(4, "big") + request)
        while self._stream.queued:  # the rest waits for the server's flow control
            self._send()
            self._housekeeping(*self._frame())
        self._sender.control(frames.head(0, frames.DATA, frames.END_STREAM, self._stream_id))
        self._send()

    def messages(self) -> Iterator[bytes]:
        """Yield the messages of the reply. Raises CallError if the call's status is not OK."""
        body, heads = bytearray(), 0
        while True:
            kind, flags, stream_id, data = self._frame()
            if stream_id != self._stream_id or kind not in (frames.DATA, frames.HEADERS):
                self._housekeeping(kind, flags, stream_id, data)
                continue
            if kind == frames.DATA:
                self._consumed(len(data))
                body += _unpadded(flags, data)
                while (message := _take(body)) is not None:
                    yield message
                if flags & frames.END_STREAM:
                    raise CallError(Code.INTERNAL, "the call ended without a status")
                continue
            fields = self._fields(flags, data)
            heads += 1
            if flags & frames.END_STREAM:
                self.ended = b"grpc-status" in fields
                _check_status(fields, body)
                return
            if heads > 1 or fields.get(b":status") != b"200":
                raise _not_grpc(fields)

    def _fields(self, flags: int, data: bytes) -> dict[bytes, bytes]:
        block = _unpadded(flags, data)
        if flags & frames.WITH_PRIORITY:
            block = block[5:]
        while not flags & frames.END_HEADERS:
            kind, flags, _, more = self._frame()
            block += more
            if kind != frames.CONTINUATION or len(block) > HEADERS_LIMIT_BYTES:
                raise self._broken("the server sent an endless header block")
        try:
            fields = self._decoder.decode(bytes(block), HEADERS_LIMIT_BYTES)
        except hpack.BadBlock as error:
            raise self._broken(f"the server sent malformed headers: {error}") from None
        if fields is None:
            raise self._broken(f"the server sent headers of more than {HEADERS_LIMIT_BYTES} bytes")
        return dict(fields)

    def _consumed(self, size: int) -> None:
        """Account for `size` bytes of the reply in HTTP/2's flow control. Sends WINDOW_UPDATE
        frames when half of the window is used."""
        self._unread_bytes += size
        if self._unread_bytes >= WINDOW_BYTES // 2:
            # Data counts in both windows, that of the connection and that of the stream (section
            # 6.9.1).
            for stream_id in (0, self._stream_id):
                self._sender.control(frames.window_update(stream_id, self._unread_bytes))
            self._unread_bytes = 0
            self._send()

    def _housekeeping(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        """Process a frame that is not part of the reply, such as SETTINGS, PING or GOAWAY. Raises
        CallError if the frame ends the call."""
        if kind == frames.SETTINGS and not flags & frames.ACK:
            for at in range(0, len(body), frames.SETTING.size):
                self._apply(*frames.SETTING.unpack_from(body, at))
            self._sender.control(frames.SETTINGS_ACK)
            self._send()
        elif kind == frames.PING and not flags & frames.ACK:
            self._sender.control(frames.pong(body))
            self._send()
        elif kind == frames.WINDOW_UPDATE:
            increment = frames.WORD.unpack(body)[0]
            if stream_id == 0:
                self._sender.widen(increment)
            elif stream_id == self._stream_id:
                self._sender.widen_stream(self._stream, increment)
        elif kind == frames.GOAWAY:
            self.intact = False  # no further calls; the reply to this one may still arrive
            last = frames.WORD.unpack_from(body)[0]
            code = frames.WORD.unpack_from(body, frames.WORD.size)[0]
            # A server that stops in order names the last stream that it still answers (RFC 9113,
            # section 6.8).
            if last < self._stream_id or code:
                debug_data = body[2 * frames.WORD.size :].decode("utf-8", "replace")
                raise CallError(Code.UNAVAILABLE, debug_data or "the server is going away")
        elif kind == frames.RST_STREAM and stream_id == self._stream_id:
            self.intact = False
            reset = frames.WORD.unpack(body)[0]
            raise CallError(
                BY_RESET.get(reset, Code.INTERNAL), f"the call was reset with code {reset}"
            )
        elif kind in (frames.DATA, frames.HEADERS, frames.CONTINUATION, frames.PUSH_PROMISE):
            raise self._broken(f"the server sent an unexpected frame of kind {kind}")

    def _apply(self, name: int, value: int) -> None:
        if name == Setting.INITIAL_WINDOW_SIZE:
            self._sender.change_initial(value, [self._stream])
        elif name == Setting.MAX_FRAME_SIZE:
            self._sender.frame_bytes = value

    def _frame(self) -> tuple[int, int, int, bytes]:
        """Read the next frame and return its type, flags, stream id and body. Raises CallError if
        the server's first frame is not SETTINGS."""
        self._receive(frames.HEAD_BYTES)
        high, low, kind, flags, stream_id = frames.HEAD.unpack_from(self._received)
        length = high << 8 | low
        # The first frame must be SETTINGS (RFC 9113, section 3.4): other protocols are detected
        # here.
        if not self._greeted and (kind != frames.SETTINGS or length % frames.SETTING.size):
            raise self._broken("the server's first frame is not SETTINGS: it does not speak HTTP/2")
        if length > frames.FRAME_LIMIT_BYTES:
            raise self._broken(f"a frame of {length} bytes is too large")
        self._receive(frames.HEAD_BYTES + length)
        self._greeted = True
        body = bytes(self._received[frames.HEAD_BYTES : frames.HEAD_BYTES + length])
        del self._received[: frames.HEAD_BYTES + length]
        return kind, flags, stream_id & frames.STREAM_MAX, body

    def _receive(self, size: int) -> None:
        """Read from the socket until at least `size` bytes are buffered."""
        while len(self._received) < size:
            self._limit_wait()
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                if self._greeted or (
                    self.deadline is not None and time.monotonic() >= self.deadline
                ):
                    raise
                raise self._broken(f"no HTTP/2 settings in {CONNECT_TIMEOUT_S:g} s") from None
            if not data:
                raise self._broken("the connection was closed")
            self._received += data

    def _send(self) -> None:
        self._limit_wait()
        self._socket.sendall(self._sender.take())

    def _limit_wait(self) -> None:
        """Set the socket's timeout to the time left until the call's deadline. While the server's
        first SETTINGS frame is missing, the deadline for this frame counts instead if it is
        earlier. Raises TimeoutError if the call's deadline has passed."""
        limits = [
            limit
            for limit in (self.deadline, None if self._greeted else self._greet_until)
            if limit is not None
        ]
        if not limits:
            self._socket.settimeout(None)
            return
        left_s = min(limits) - time.monotonic()
        if left_s <= 0 and self.deadline is not None and time.monotonic() >= self.deadline:
            raise TimeoutError
        # 0 would make the socket non-blocking
        self._socket.settimeout(max(left_s, 0.001))

    def _broken(self, why: str) -> CallError:
        self.intact = False
        return CallError(Code.UNAVAILABLE, why)


def _unpadded(flags: int, data: bytes) -> bytes:
    return data[1 : len(data) - data[0]] if flags & frames.PADDED and data else data


def _take(body: bytearray) -> bytes | None:
    """Remove the first gRPC message from `body` and return it; None if it is not complete yet.
    Raises CallError for a compressed or too large message."""
    if len(body) < 5:
        return None
    size = int.from_bytes(body[1:5], "big")
    if body[0]:
        raise CallError(
            Code.INTERNAL, "the reply is compressed, although the client did not allow compression"
        )
    if size > MESSAGE_LIMIT_BYTES:
        raise CallError(
            Code.RESOURCE_EXHAUSTED,
            f"the reply has {size} bytes; the limit is {MESSAGE_LIMIT_BYTES}",
        )
    if len(body) < 5 + size:
        return None
    message = bytes(memoryview(body)[5 : 5 + size])
    del body[: 5 + size]
    return message


def _check_status(fields: dict[bytes, bytes], rest: bytearray) -> None:
    status = fields.get(b"grpc-status", b"")
    if not re.fullmatch(rb"[0-9]{1,2}", status):
        raise _not_grpc(fields)
    if int(status):
        from urllib.parse import unquote  # takes 3 ms, and only errors need it

        code = Code(int(status)) if int(status) in Code._value2member_map_ else Code.UNKNOWN
        raise CallError(code, unquote(fields.get(b"grpc-message", b"").decode("ascii", "replace")))
    if rest:
        raise CallError(Code.INTERNAL, "the reply ends within a message")


def _not_grpc(fields: dict[bytes, bytes]) -> CallError:
    status = fields.get(b":status", b"")
    code = BY_HTTP_STATUS.get(int(status), Code.UNKNOWN) if status.isdigit() else Code.UNKNOWN
    return CallError(
        code, f"no gRPC reply: HTTP status {status.decode('ascii', 'replace') or 'missing'}"
    )
