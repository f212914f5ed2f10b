"""The framing of gRPC over HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md): headers, length-prefixed messages,
statuses. No I/O."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from cri_server.http2 import frames, hpack
from cri_server.http2.hpack import Field
from cri_server.rpc.codes import CallFailed, Code

PREFIX_BYTES = 5  # compressed flag, length
MESSAGE_LIMIT_BYTES = 32 << 20
# The limit of grpc-message. Clients of gRPC's C core limit all headers to 8 KiB.
STATUS_MESSAGE_LIMIT_BYTES = 6 << 10
UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
ENCODINGS = (b"identity", b"gzip")

# PROTOCOL-HTTP2.md permits at most eight digits.
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# All but printable ASCII is escaped, and `%` itself (PROTOCOL-HTTP2.md, Percent-Encoded).
_ESCAPED = re.compile(rb"[^ -$&-~]")

HEAD_BLOCK = hpack.STATUS_200 + hpack.literal(b"content-type", b"application/grpc")
OK_BLOCK = hpack.literal(b"grpc-status", b"0")


class NotGrpc(Exception):
    """A request is not gRPC. `http_status`: the HTTP status to answer."""

    def __init__(self, http_status: int) -> None:
        super().__init__(http_status)
        self.http_status = http_status


@dataclass(slots=True)
class Head:
    """The headers of a gRPC request. `timeout_s`: None if the call has no deadline; `origin`: the
    W3C traceparent, empty if there is none."""

    path: bytes
    timeout_s: float | None
    encoding: bytes
    origin: str = ""


def parse_head(fields: list[Field]) -> Head:
    """Parse a request's headers. Raises NotGrpc if this is no gRPC request, and CallFailed if its
    timeout is malformed."""
    path = method = content_type = b""
    encoding, timeout_s, origin = b"identity", None, ""
    for name, value in fields:
        if name == b":path":
            path = value
        elif name == b"grpc-timeout":
            timeout_s = parse_timeout_s(value)
        elif name == b"content-type":
            content_type = value
        elif name == b":method":
            method = value
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"traceparent":
            origin = value.decode() if _TRACEPARENT.fullmatch(value) else ""
    if method != b"POST":
        raise NotGrpc(405)
    if not content_type.startswith(b"application/grpc"):
        # PROTOCOL-HTTP2.md demands this status: other clients of HTTP would take a gRPC error,
        # whose HTTP status is 200, for a success.
        raise NotGrpc(415)
    return Head(path, timeout_s, encoding, origin)


def parse_timeout_s(text: bytes) -> float:
    """Parse a grpc-timeout such as `100m` (milliseconds) and return the seconds. Raises CallFailed
    for malformed text."""
    match = _TIMEOUT.fullmatch(text)
    if match is None:
        raise CallFailed(Code.INTERNAL, f"grpc-timeout {text[:20]!r} is malformed")
    return int(match[1]) * UNIT_S[match[2]]


def not_grpc_reply(http_status: int) -> tuple[bytes, bytes]:
    """Return the header block and the body of the reply to a request that is not gRPC."""
    body = b"this is a gRPC server: POST with content-type application/grpc\n"
    block = hpack.literal(b":status", b"%d" % http_status) + hpack.literal(
        b"content-type", b"text/plain"
    )
    return block + hpack.literal(b"content-length", b"%d" % len(body)), body


def status_block(code: Code, message: str) -> bytes:
    """Return the header block with a call's `grpc-status` and `grpc-message`. A long message is
    truncated."""
    if code == Code.OK:
        return OK_BLOCK
    block = hpack.literal(b"grpc-status", b"%d" % code)
    if message:
        block += hpack.literal(b"grpc-message", escape(message))
    return block


def escape(message: str) -> bytes:
    """Percent-encode all characters but printable ASCII; truncate the result to
    `STATUS_MESSAGE_LIMIT_BYTES`."""
    raw = message.encode("utf-8", "replace")
    whole = _ESCAPED.sub(lambda match: b"%%%02X" % match[0][0], raw)
    if len(whole) <= STATUS_MESSAGE_LIMIT_BYTES:
        return whole
    cut = whole[: STATUS_MESSAGE_LIMIT_BYTES - 3]
    broken = cut.rfind(b"%", -2)
    cut = cut[:broken] if broken >= 0 else cut
    # Remove the last character's bytes, which the cut may have left incomplete.
    while (last := cut[-3:])[:1] == b"%" and int(last[1:], 16) >= 0x80:
        cut = cut[:-3]
        if int(last[1:], 16) >= 0xC0:
            break
    return cut + b"..."


def prefix(size: int) -> bytes:
    """Return the 5 bytes that precede an uncompressed message of `size` bytes."""
    return b"\0" + size.to_bytes(4, "big")


def message(payload: bytes) -> bytes:
    """Return `payload` as an uncompressed gRPC message, with its 5-byte prefix."""
    return prefix(len(payload)) + payload


def whole_message(body: bytes) -> bytes | None:
    """Return the payload of `body` if it is exactly one uncompressed message, else None."""
    if (
        len(body) >= PREFIX_BYTES
        and not body[0]
        and int.from_bytes(body[1:5], "big") == len(body) - PREFIX_BYTES
    ):
        return body[PREFIX_BYTES:]
    return None


class IncomingMessage:
    """Assembles the message of a request that arrives in several pieces."""

    __slots__ = ("_body", "_compressed", "_encoding", "_limit_bytes", "length")

    def __init__(self, encoding: bytes, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self._body = bytearray()
        self._encoding, self._limit_bytes, self._compressed = encoding, limit_bytes, False
        self.length: int | None = None  # of the message on the wire; None before its prefix

    @property
    def received(self) -> int:
        """The number of bytes received."""
        return len(self._body)

    def add(self, data: bytes) -> int:
        """Append received bytes. Return the number of bytes by which the caller must enlarge the
        stream's window (WINDOW_UPDATE), so that the rest of the message can arrive. The number is
        0, except when these bytes complete the length prefix of a long message.

        Raises CallFailed for a message that is too long, for a second message, and for an unknown
        encoding.
        """
        self._body += data
        credit = 0
        if self.length is None and len(self._body) >= PREFIX_BYTES:
            self.length = int.from_bytes(self._body[1:5], "big")
            self._check_prefix(self._body[0], self.length)
            credit = max(0, self.length + PREFIX_BYTES - frames.WINDOW_BYTES)
        if self.length is not None and len(self._body) > self.length + PREFIX_BYTES:
            raise CallFailed(Code.UNIMPLEMENTED, "more than one message in the request")
        return credit

    def _check_prefix(self, flag: int, length: int) -> None:
        if flag > 1:
            raise CallFailed(Code.INTERNAL, f"the compressed flag is {flag}, not 0 or 1")
        self._compressed = bool(flag)
        # The codes are those of grpc/doc/compression.md: UNIMPLEMENTED for an algorithm that this
        # side lacks, INTERNAL for a compressed message without an announced algorithm.
        if self._compressed and self._encoding not in ENCODINGS:
            raise CallFailed(
                Code.UNIMPLEMENTED, f"grpc-encoding {self._encoding[:20]!r} is not supported"
            )
        if self._compressed and self._encoding == b"identity":
            raise CallFailed(Code.INTERNAL, "a compressed message without grpc-encoding")
        if length > self._limit_bytes:
            raise self._too_long(length)

    def _too_long(self, length: int) -> CallFailed:
        return CallFailed(
            Code.RESOURCE_EXHAUSTED,
            f"the message of {length} bytes exceeds {self._limit_bytes} bytes",
        )

    def finish(self) -> bytes:
        """Return the message, decompressed. Call it after the client has half-closed the stream.
        Raises CallFailed if the message is missing, incomplete or cannot be decompressed."""
        if not self._body:
            raise CallFailed(Code.UNIMPLEMENTED, "no message in the request")
        if self.length is None or len(self._body) < self.length + PREFIX_BYTES:
            raise CallFailed(Code.INTERNAL, "the request ends within its message")
        payload = bytes(memoryview(self._body)[PREFIX_BYTES:])
        return self._inflate(payload) if self._compressed else payload

    def _inflate(self, payload: bytes) -> bytes:
        """Decompress a gzip payload. Raises CallFailed if it is damaged or longer than
        `limit_bytes`."""
        # 16 selects the gzip format (zlib.h, inflateInit2). The output is limited while it is made:
        # deflate expands up to 1032 times.
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            payload_ = unpacker.decompress(payload, self._limit_bytes + 1)
        except zlib.error as error:
            raise CallFailed(Code.INTERNAL, f"gzip: {error}") from None
        if len(payload_) > self._limit_bytes:
            raise self._too_long(len(payload_))
        if not unpacker.eof or unpacker.unused_data:
            raise CallFailed(Code.INTERNAL, "gzip: expected exactly one complete member")
        return payload_
