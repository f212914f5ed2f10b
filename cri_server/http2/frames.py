"""HTTP/2 frames (RFC 9113): their numbers, and the encoding of the frames that a server sends."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">HBBBI")  # length as 16 + 8 bits, kind, flags, stream
HEAD_BYTES = HEAD.size
WORD = struct.Struct(">I")
SETTING = struct.Struct(">HI")
FRAME_LIMIT_BYTES = 16384  # SETTINGS_MAX_FRAME_SIZE, initial and smallest value
FRAME_LIMIT_MAX_BYTES = (1 << 24) - 1
WINDOW_BYTES = 65535  # SETTINGS_INITIAL_WINDOW_SIZE, initial value
WINDOW_MAX_BYTES = STREAM_MAX = (1 << 31) - 1

# Kinds and flags are plain numbers: they are compared for every frame.
(
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH_PROMISE,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION,
) = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20


class Setting(IntEnum):
    """The numbers of the settings in a SETTINGS frame (RFC 9113, section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Encode a frame header."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: dict[Setting, int]) -> bytes:
    return head(SETTING.size * len(values), SETTINGS, 0, 0) + b"".join(
        SETTING.pack(name, value) for name, value in values.items()
    )


SETTINGS_ACK = head(0, SETTINGS, ACK, 0)


def pong(data: bytes) -> bytes:
    return head(len(data), PING, ACK, 0) + data


def rst_stream(stream_id: int, code: int) -> bytes:
    return head(WORD.size, RST_STREAM, 0, stream_id) + WORD.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    return head(WORD.size, WINDOW_UPDATE, 0, stream_id) + WORD.pack(increment)


def goaway(last_stream_id: int, code: int, reason: bytes = b"") -> bytes:
    return (
        head(2 * WORD.size + len(reason), GOAWAY, 0, 0)
        + WORD.pack(last_stream_id)
        + WORD.pack(code)
        + reason
    )
