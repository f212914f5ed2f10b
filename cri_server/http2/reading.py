"""Bytes in any cut to frames: the preface, then heads and bodies; at most one frame is kept."""

from __future__ import annotations

from collections.abc import Iterator

from cri_server.http2 import frames
from cri_server.http2.frames import HEAD, HEAD_BYTES, ErrorCode

Frame = tuple[int, int, int, bytes]  # kind, flags, stream, body


class Broken(Exception):
    """The connection cannot go on."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class Reader:
    """What a client sends, in order."""

    __slots__ = ("_greeted", "_partial", "_wanted")

    def __init__(self) -> None:
        self._partial = bytearray()
        self._wanted = len(frames.PREFACE)  # bytes that the next step needs
        self._greeted = False

    def read(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, each when it is asked for. Raises Broken."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, end = 0, len(data)
        if not self._greeted:
            preface = frames.PREFACE
            if data[: len(preface)] != preface[:end]:
                raise Broken(ErrorCode.PROTOCOL_ERROR, "it does not begin as HTTP/2 does")
            self._greeted = end >= len(preface)
            at = len(preface) if self._greeted else end
            if not self._greeted:
                self._partial += data
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, stream_id = HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > frames.FRAME_LIMIT_BYTES:
                raise Broken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            begin = at + HEAD_BYTES
            if end - begin < length:
                self._wanted = HEAD_BYTES + length
                self._partial += data[at:]
                return
            at = begin + length
            yield kind, flags, stream_id & frames.STREAM_MAX, data[begin:at]
        if self._greeted:
            self._wanted = HEAD_BYTES
        if at < end:
            self._partial += data[at:]


def unpadded(body: bytes) -> bytes:
    """Without the length of the padding and the padding. Raises Broken."""
    if not body or body[0] >= len(body):
        raise Broken(ErrorCode.PROTOCOL_ERROR, "padding that is longer than its frame")
    return body[1 : len(body) - body[0]]


def check_size(right: bool, name: str) -> None:
    """Raises Broken for a frame whose size or place is not `right`."""
    if not right:
        raise Broken(ErrorCode.FRAME_SIZE_ERROR, f"{name} of a wrong size or place")
