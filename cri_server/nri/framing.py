"""Encodes and decodes ttrpc messages in frames of NRI's multiplexer, without I/O.

One stream socket carries two ttrpc connections, one per direction of calls. A multiplexer frame is
`connection, length, payload`. A ttrpc message is `length, stream, kind, flags, payload`. All
numbers are big-endian (pkg/net/multiplex of the Go module github.com/containerd/nri; PROTOCOL.md of
github.com/containerd/ttrpc). A frame may hold any part of a message.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

FRAME = struct.Struct(">II")
MESSAGE = struct.Struct(">IIBB")
PLUGIN_SERVICE, RUNTIME_SERVICE = 1, 2  # the connections, by the called service
REQUEST, RESPONSE, DATA = 1, 2, 3

# This is ttrpc's messageLengthMax (channel.go): a Go peer refuses a longer message.
MESSAGE_LIMIT_BYTES = 4 << 20
FRAME_LIMIT_BYTES = MESSAGE.size + MESSAGE_LIMIT_BYTES
# A plugin in Go fails on a frame that is larger than the buffer of its read. It reads a message's
# first frame into a buffer of this size, and a larger rest directly into the message.
FIRST_FRAME_BYTES = 4096


class ProtocolError(Exception):
    """The peer violated the protocol; the connection must be closed."""


class TooLarge(Exception):
    """A message of `size` bytes exceeds the limit and was not sent."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the message of {size} bytes exceeds {MESSAGE_LIMIT_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Message:
    """A ttrpc message. `connection`: PLUGIN_SERVICE or RUNTIME_SERVICE."""

    connection: int
    stream: int
    kind: int
    payload: bytes


def encode(connection: int, stream: int, kind: int, payload: bytes) -> bytes:
    """Encode a message as frames. Raises TooLarge."""
    if len(payload) > MESSAGE_LIMIT_BYTES:
        raise TooLarge(len(payload))
    whole = MESSAGE.pack(len(payload), stream, kind, 0) + payload
    parts = (whole[:FIRST_FRAME_BYTES], whole[FIRST_FRAME_BYTES:])
    return b"".join(FRAME.pack(connection, len(part)) + part for part in parts if part)


@dataclass(slots=True)
class FrameDecoder:
    """Decodes messages. Frames of unknown connections are dropped, as in the Go module."""

    _trunk: bytearray = field(default_factory=bytearray)
    _streams: dict[int, bytearray] = field(
        default_factory=lambda: {PLUGIN_SERVICE: bytearray(), RUNTIME_SERVICE: bytearray()}
    )

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes. Raises ProtocolError."""
        self._trunk += data
        messages: list[Message] = []
        while len(self._trunk) >= FRAME.size:
            connection, length = FRAME.unpack_from(self._trunk)
            if length > FRAME_LIMIT_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is too large")
            end = FRAME.size + length
            if len(self._trunk) < end:
                break
            stream = self._streams.get(connection)
            if stream is not None:
                stream += self._trunk[FRAME.size : end]
                messages += self._messages(connection, stream)
            del self._trunk[:end]
        return messages

    def _messages(self, connection: int, stream: bytearray) -> list[Message]:
        messages = []
        while len(stream) >= MESSAGE.size:
            length, number, kind, _ = MESSAGE.unpack_from(stream)  # flags
            if length > MESSAGE_LIMIT_BYTES:
                raise ProtocolError(f"a message of {length} bytes is too large")
            end = MESSAGE.size + length
            if len(stream) < end:
                break
            messages.append(Message(connection, number, kind, bytes(stream[MESSAGE.size : end])))
            del stream[:end]
        return messages
