"""Tests the multiplexer's frames and ttrpc's messages, byte by byte."""

from __future__ import annotations

import struct

import pytest

from cri_server.nri import framing
from cri_server.nri.framing import FrameDecoder, Message, ProtocolError, TooLarge, encode


@pytest.mark.parametrize("size", [0, 1, 4086, 4087, 10_000, framing.MESSAGE_LIMIT_BYTES])
def test_encoded_messages_are_decoded(size: int) -> None:
    payload = bytes(size)
    data = encode(2, 7, framing.RESPONSE, payload)
    assert FrameDecoder().feed(data) == [Message(2, 7, framing.RESPONSE, payload)]


def test_frames_arrive_byte_by_byte_and_interleaved() -> None:
    first, second = encode(1, 1, framing.REQUEST, b"one"), encode(2, 1, framing.RESPONSE, b"two")
    decoder = FrameDecoder()
    messages = [message for byte in first + second for message in decoder.feed(bytes([byte]))]
    assert [(m.connection, m.payload) for m in messages] == [(1, b"one"), (2, b"two")]


def test_a_message_may_span_frames_and_a_frame_may_have_several_messages() -> None:
    message = struct.pack(">IIBB", 2, 3, 1, 0) + b"ab"
    frames = b"".join(struct.pack(">II", 1, 1) + bytes([byte]) for byte in message)
    assert [m.payload for m in FrameDecoder().feed(frames)] == [b"ab"]
    together = struct.pack(">II", 1, 2 * len(message)) + 2 * message
    assert [m.payload for m in FrameDecoder().feed(together)] == [b"ab", b"ab"]


def test_the_first_frame_fits_the_buffer_of_plugins_in_go() -> None:
    data = encode(1, 1, framing.REQUEST, bytes(20_000))
    lengths = []
    while data:
        _, length = framing.FRAME.unpack_from(data)
        lengths.append(length)
        data = data[framing.FRAME.size + length :]
    assert lengths == [4096, 20_010 - 4096]


def test_unknown_connections_are_dropped_and_invalid_frames_refused() -> None:
    assert FrameDecoder().feed(struct.pack(">II", 9, 3) + b"abc" + encode(1, 1, 2, b"")) == [
        Message(1, 1, 2, b"")
    ]
    with pytest.raises(ProtocolError, match="a frame of"):
        FrameDecoder().feed(struct.pack(">II", 1, framing.FRAME_LIMIT_BYTES + 1))
    with pytest.raises(ProtocolError, match="a message of"):
        FrameDecoder().feed(struct.pack(">IIIIBB", 1, 10, framing.MESSAGE_LIMIT_BYTES + 1, 1, 1, 0))
    with pytest.raises(TooLarge):
        encode(1, 1, 1, bytes(framing.MESSAGE_LIMIT_BYTES + 1))
