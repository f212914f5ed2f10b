"""gRPC calls over a unix socket, for a command that makes a few of them and ends: HTTP/2 (RFC 9113)
by blocking reads and writes.

The library for gRPC takes longer to import (80 ms of CPU) than everything else that `ps` does. What
it offers beyond this is for clients that stay: names, balancing, retries, many calls on a
connection. Here a call has a connection to itself, which is used again by the next one when it is
in order. Threads may call at the same time.
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
from cri_server.rpc.codes import Code

Item = TypeVar("Item")

CONNECT_TIMEOUT_S = 5.0  # also how long a greeting may take
MESSAGE_LIMIT_BYTES = 32 << 20
HEADERS_LIMIT_BYTES = 64 << 10
WINDOW_BYTES = 1 << 20  # what the server may send before we have read it
READ_BYTES = 1 << 16
TIMEOUT_LIMIT_MS = 99_999_999  # eight digits (grpc/doc/PROTOCOL-HTTP2.md)
BY_HTTP_STATUS = {
    400: Code.INTERNAL, 401: Code.UNAUTHENTICATED, 403: Code.PERMISSION_DENIED, 404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE, 502: Code.UNAVAILABLE, 503: Code.UNAVAILABLE, 504: Code.UNAVAILABLE,
}  # fmt: skip
BY_RESET = {
    frames.ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
    frames.ErrorCode.CANCEL: Code.CANCELLED,
    frames.ErrorCode.ENHANCE_YOUR_CALM: Code.RESOURCE_EXHAUSTED,
    frames.ErrorCode.INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
}
_SETTINGS = frames.PREFACE + frames.settings(
    {Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES, Setting.MAX_HEADER_LIST_SIZE: HEADERS_LIMIT_BYTES}
)  # fmt: skip
_GREETING = _SETTINGS + frames.window_update(0, WINDOW_BYTES - frames.WINDOW_BYTES)
_PSEUDO_FIELDS = b"".join(
    hpack.literal(name, value)
    for name, value in ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost"))
)
_FIELDS = b"".join(
    hpack.literal(name, value)
    for name, value in ((b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"pyrunc-cri"))
)  # fmt: skip


class CallError(Exception):
    """A call that failed: gRPC's code, and the words of the server or of the transport."""

    def __init__(self, code: Code, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class Channel:
    """Calls to the server behind the socket `path`."""

    def __init__(self, path: str) -> None:
        self._path, self._idle = path, deque[_Connection]()

    def close(self) -> None:
        """Hang up."""
        while self._idle:
            self._idle.pop().close()

    def unary(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        """The message that answers `request`. Raises CallError."""
        answers = list(self.stream(path, request, bytes, timeout_s))
        if len(answers) != 1:
            raise CallError(Code.INTERNAL, f"{len(answers)} messages where one was due")
        return answers[0]

    def stream(
        self,
        path: str,
        request: bytes,
        decode: Callable[[bytes], Item],
        timeout_s: float | None = None,
    ) -> Iterator[Item]:
        """The messages that answer `request`, until the server ends the call. Raises CallError. One
        that is left early is cancelled."""
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
        finally:
            if connection.ended and connection.in_order:
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
    """One connection, which carries one call at a time. What its methods raise: CallError, OSError
    (TimeoutError: the deadline)."""

    def __init__(self, path: str, deadline: float | None) -> None:
        # ended: no call is under way
        self.deadline, self.in_order, self.ended = deadline, True, True
        self._stream_id, self._greeted = -1, False
        self._received, self._decoder = bytearray(), hpack.Decoder()
        self._unread_bytes = 0  # that the server's windows have not got back
        self._window = self._stream_window = self._first_window = frames.WINDOW_BYTES
        self._frame_limit = frames.FRAME_LIMIT_BYTES
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise
        self._greet_until = time.monotonic() + CONNECT_TIMEOUT_S
        self._unsent = _GREETING

    def close(self) -> None:
        """The server cancels what it still does for us."""
        self._socket.close()

    def usable(self) -> bool:
        """Whether another call can be made: a server that has hung up meanwhile has said so."""
        try:
            while self._received or select.select([self._socket], [], [], 0)[0]:
                kind, flags, stream_id, body = self._frame()
                self._housekeeping(kind, flags, stream_id, body)
        except (CallError, OSError):
            return False
        return self.in_order

    def begin(self, path: str, request: bytes, timeout_s: float | None) -> None:
        """Send the request."""
        self._stream_id += 2
        self.ended = False
        self._stream_window = self._first_window
        block = _PSEUDO_FIELDS + hpack.literal(b":path", path.encode()) + _FIELDS
        if timeout_s is not None:
            milliseconds = min(TIMEOUT_LIMIT_MS, max(1, round(timeout_s * 1000)))
            block += hpack.literal(b"grpc-timeout", b"%dm" % milliseconds)
        head = frames.head(len(block), frames.HEADERS, frames.END_HEADERS, self._stream_id)
        self._unsent += head + block
        payload = memoryview(b"\0" + len(request).to_bytes(4, "big") + request)
        while payload:
            room = min(self._window, self._stream_window, self._frame_limit)
            if room <= 0:
                self._send()
                self._housekeeping(*self._frame())
                continue
            part, payload = payload[:room], payload[room:]
            self._window -= len(part)
            self._stream_window -= len(part)
            flags = 0 if payload else frames.END_STREAM
            self._unsent += frames.head(len(part), frames.DATA, flags, self._stream_id) + bytes(
                part
            )
        self._send()

    def messages(self) -> Iterator[bytes]:
        """What the server answers; raises CallError for a status that is not OK."""
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
                raise self._broken("a header block that does not end")
        try:
            found = self._decoder.decode(bytes(block), HEADERS_LIMIT_BYTES)
        except hpack.BadBlock as error:
            raise self._broken(str(error)) from None
        if found is None:
            raise self._broken(f"headers of more than {HEADERS_LIMIT_BYTES} bytes")
        return dict(found)

    def _consumed(self, size: int) -> None:
        """Give windows back when half of them is used."""
        self._unread_bytes += size
        if self._unread_bytes >= WINDOW_BYTES // 2:
            for stream_id in (0, self._stream_id):
                self._unsent += frames.window_update(stream_id, self._unread_bytes)
            self._unread_bytes = 0
            self._send()

    def _housekeeping(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        """A frame that is not a part of the answer."""
        if kind == frames.SETTINGS and not flags & frames.ACK:
            for at in range(0, len(body), frames.SETTING.size):
                self._apply(*frames.SETTING.unpack_from(body, at))
            self._unsent += frames.SETTINGS_ACK
            self._send()
        elif kind == frames.PING and not flags & frames.ACK:
            self._unsent += frames.pong(body)
            self._send()
        elif kind == frames.WINDOW_UPDATE:
            increment = frames.WORD.unpack(body)[0]
            if stream_id == 0:
                self._window += increment
            elif stream_id == self._stream_id:
                self._stream_window += increment
        elif kind == frames.GOAWAY:
            self.in_order = False  # for another call; this one may be answered
            last = frames.WORD.unpack_from(body)[0]
            code = frames.WORD.unpack_from(body, frames.WORD.size)[0]
            if last < self._stream_id or code:
                words = body[2 * frames.WORD.size :].decode("utf-8", "replace")
                raise CallError(Code.UNAVAILABLE, words or "the server is going away")
        elif kind == frames.RST_STREAM and stream_id == self._stream_id:
            self.in_order = False
            reset = frames.WORD.unpack(body)[0]
            raise CallError(
                BY_RESET.get(reset, Code.INTERNAL), f"the call was reset with code {reset}"
            )
        elif kind in (frames.DATA, frames.HEADERS, frames.CONTINUATION, frames.PUSH_PROMISE):
            raise self._broken(f"a frame of kind {kind} where none was due")

    def _apply(self, name: int, value: int) -> None:
        if name == Setting.INITIAL_WINDOW_SIZE:
            self._stream_window += value - self._first_window
            self._first_window = value
        elif name == Setting.MAX_FRAME_SIZE:
            self._frame_limit = value

    def _frame(self) -> tuple[int, int, int, bytes]:
        """The next one. The first must be the server's settings."""
        self._receive(frames.HEAD_BYTES)
        high, low, kind, flags, stream_id = frames.HEAD.unpack_from(self._received)
        length = high << 8 | low
        if not self._greeted and (kind != frames.SETTINGS or length % frames.SETTING.size):
            raise self._broken("it does not greet as HTTP/2 does")
        if length > frames.FRAME_LIMIT_BYTES:
            raise self._broken(f"a frame of {length} bytes")
        self._receive(frames.HEAD_BYTES + length)
        self._greeted = True
        body = bytes(self._received[frames.HEAD_BYTES : frames.HEAD_BYTES + length])
        del self._received[: frames.HEAD_BYTES + length]
        return kind, flags, stream_id & frames.STREAM_MAX, body

    def _receive(self, wanted: int) -> None:
        """Have so many bytes that are not read yet."""
        while len(self._received) < wanted:
            self._limit_wait()
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                if self._greeted or (
                    self.deadline is not None and time.monotonic() >= self.deadline
                ):
                    raise
                raise self._broken(f"no greeting in {CONNECT_TIMEOUT_S:g} s") from None
            if not data:
                raise self._broken("the connection was closed")
            self._received += data

    def _send(self) -> None:
        data, self._unsent = self._unsent, b""
        self._limit_wait()
        self._socket.sendall(data)

    def _limit_wait(self) -> None:
        """Until the call's deadline, and the greeting's."""
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
        self._socket.settimeout(max(left_s, 0.001))

    def _broken(self, why: str) -> CallError:
        self.in_order = False
        return CallError(Code.UNAVAILABLE, why)


def _unpadded(flags: int, data: bytes) -> bytes:
    return data[1 : len(data) - data[0]] if flags & frames.PADDED and data else data


def _take(body: bytearray) -> bytes | None:
    """The first whole message, which goes out of `body`."""
    if len(body) < 5:
        return None
    size = int.from_bytes(body[1:5], "big")
    if body[0]:
        raise CallError(Code.INTERNAL, "a compressed answer, though none was asked for")
    if size > MESSAGE_LIMIT_BYTES:
        raise CallError(
            Code.RESOURCE_EXHAUSTED,
            f"an answer of {size} bytes is longer than {MESSAGE_LIMIT_BYTES}",
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
        from urllib.parse import unquote  # 3 ms that a call that succeeds does not pay

        code = Code(int(status)) if int(status) in Code._value2member_map_ else Code.UNKNOWN
        raise CallError(code, unquote(fields.get(b"grpc-message", b"").decode("ascii", "replace")))
    if rest:
        raise CallError(Code.INTERNAL, "the answer ends within a message")


def _not_grpc(fields: dict[bytes, bytes]) -> CallError:
    status = fields.get(b":status", b"")
    code = BY_HTTP_STATUS.get(int(status), Code.UNKNOWN) if status.isdigit() else Code.UNKNOWN
    return CallError(
        code, f"no gRPC answer: HTTP status {status.decode('ascii', 'replace') or 'missing'}"
    )
