"""Encodes SPDY/3.1 frames. A frame has a header of eight bytes and a body of at most 2^24 - 1
bytes.

The header of a control frame begins with version and type (16 bits each, top bit set), that of a
data frame with the stream id (32 bits). Eight bits of flags and 24 bits of length follow.
`connection` decodes frames, because that needs the connection's state.
"""

from __future__ import annotations

import struct
from enum import IntEnum

VERSION = 3
HEAD_BYTES = 8
LENGTH_MAX = (1 << 24) - 1
STREAM_ID_MAX = (1 << 31) - 1
CONTROL = 0x80

FIN = 0x01
UNIDIRECTIONAL = 0x02

HEAD = struct.Struct(">II")
WORD = struct.Struct(">I")
TWO_WORDS = HEAD
_CONTROL_HEAD = struct.Struct(">HHI")


class Type(IntEnum):
    """Types of control frames. 5 (NOOP) and 10 (CREDENTIAL) are missing: SPDY/3.1 does not have
    them."""

    SYN_STREAM = 1
    SYN_REPLY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    HEADERS = 8
    WINDOW_UPDATE = 9


class Status(IntEnum):
    """The status codes of RST_STREAM that the server sends."""

    PROTOCOL_ERROR = 1
    REFUSED_STREAM = 3
    CANCEL = 5
    INTERNAL_ERROR = 6
    STREAM_ALREADY_CLOSED = 9


class Parting(IntEnum):
    """The status codes of GOAWAY that the server sends."""

    OK = 0
    PROTOCOL_ERROR = 1


def control(kind: Type, flags: int, body: bytes) -> bytes:
    """Encode a control frame."""
    return _CONTROL_HEAD.pack(CONTROL << 8 | VERSION, kind, flags << 24 | len(body)) + body


def data_head(stream_id: int, length: int, fin: bool) -> bytes:
    """Encode the header of a data frame. The caller sends the body of `length` bytes after it.
    `fin`: the frame is the last one of this side on the stream."""
    return HEAD.pack(stream_id, (FIN if fin else 0) << 24 | length)


def syn_reply(stream_id: int, block: bytes) -> bytes:
    """Encode a SYN_REPLY, which accepts a stream."""
    return control(Type.SYN_REPLY, 0, WORD.pack(stream_id) + block)


def rst_stream(stream_id: int, status: int) -> bytes:
    """Encode an RST_STREAM."""
    return control(Type.RST_STREAM, 0, TWO_WORDS.pack(stream_id, status))


def ping(ping_id: int) -> bytes:
    """Encode a PING. The reply to a PING is the same frame."""
    return control(Type.PING, 0, WORD.pack(ping_id))


def goaway(last_stream_id: int, status: int) -> bytes:
    """Encode a GOAWAY: the server ignores streams with ids above `last_stream_id`."""
    return control(Type.GOAWAY, 0, TWO_WORDS.pack(last_stream_id, status))
