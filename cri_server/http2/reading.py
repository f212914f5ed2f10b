"""Splits received bytes into frames: the preface, then headers and bodies; buffers one frame at
most."""

from __future__ import annotations

from collections.abc import Iterator

from cri_server.http2 import frames
from cri_server.http2.frames import HEAD, HEAD_BYTES, ErrorCode

Frame = tuple[int, int, int, bytes]  # kind, flags, stream, body


class Broken(Exception):
    """A connection error: the connection must be closed with a GOAWAY."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class Reader:
    """Splits the bytes of a client into frames."""

    __slots__ = ("_greeted", "_needed", "_partial")

    def __init__(self) -> None:
        self._partial = bytearray()
        self._needed = len(frames.PREFACE)  # bytes that the next step needs
        self._greeted = False

    def read(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes, parsed one by one. Raises Broken."""
        if self._partial:
            self._partial += data
            # Parsing waits for the whole frame: a peer that sends single bytes would otherwise
            # cause a copy of the partial frame for each.
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, end = 0, len(data)
        if not self._greeted:
            preface = frames.PREFACE
            if data[: len(preface)] != preface[:end]:
                raise Broken(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
            self._greeted = end >= len(preface)
            at = len(preface) if self._greeted else end
            if not self._greeted:
                self._partial += data
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, stream_id = HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > frames.FRAME_LIMIT_BYTES:
                raise Broken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes is too large")
            begin = at + HEAD_BYTES
            if end - begin < length:
                self._needed = HEAD_BYTES + length
                self._partial += data[at:]
                return
            at = begin + length
            # The reserved bit must be ignored (section 4.1).
            yield kind, flags, stream_id & frames.STREAM_MAX, data[begin:at]
        if self._greeted:
            self._needed = HEAD_BYTES
        if at < end:
            self._partial += data[at:]


def unpadded(body: bytes) -> bytes:
    """Return the body of a padded frame without its first byte (the padding's length) and without
    the padding. Raises Broken."""
    if not body or body[0] >= len(body):
        raise Broken(ErrorCode.PROTOCOL_ERROR, "padding exceeds its frame")
    return body[1 : len(body) - body[0]]


def check_size(valid: bool, name: str) -> None:
    """Raise Broken with FRAME_SIZE_ERROR if `valid` is False. `valid`: whether the frame has a
    correct size and stream; `name`: the frame's type, for the error."""
    if not valid:
        raise Broken(ErrorCode.FRAME_SIZE_ERROR, f"a {name} frame has a wrong size or stream")
