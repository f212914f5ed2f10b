"""The state of open streams and of incomplete header blocks."""

from __future__ import annotations

from cri_server.http2 import frames
from cri_server.http2.sending import Outgoing


class Stream:
    """An open stream of an HTTP/2 connection."""

    __slots__ = ("left_bytes", "out", "receiving", "sending", "window_bytes")

    def __init__(self, out: Outgoing, receiving: bool, left_bytes: int | None) -> None:
        self.out, self.receiving, self.sending = out, receiving, True
        self.left_bytes = left_bytes  # of the body; None without content-length
        # Streams keep the initial window: most requests fit, and a longer one gets credit once its
        # announced length has been checked (`grpc_framing.Incoming.add`).
        self.window_bytes = frames.WINDOW_BYTES

    def fits(self, size: int, ended: bool) -> bool:
        """Count a part of the body; return whether content-length still holds."""
        assert self.left_bytes is not None
        self.left_bytes -= size
        return self.left_bytes == 0 if ended else self.left_bytes >= 0


class Block:
    """A header block that CONTINUATION frames complete."""

    __slots__ = ("count", "data", "ended", "stream_id")

    def __init__(self, stream_id: int, ended: bool, data: bytes) -> None:
        self.stream_id = stream_id
        self.ended = ended
        self.data = bytearray(data)
        self.count = 1
