"""The state of open streams and of incomplete header blocks."""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.http2 import frames
from cri_server.http2.sending import Outgoing


@dataclass(slots=True)
class Http2Stream:
    """An open stream of an HTTP/2 connection."""

    out: Outgoing
    receiving: bool
    left_bytes: int | None  # of the body; None without content-length
    sending: bool = True
    # Streams keep the initial window: most requests fit, and a longer one gets credit once its
    # announced length has been checked (`grpc_framing.IncomingMessage.add`).
    window_bytes: int = frames.WINDOW_BYTES

    def fits(self, size: int, ended: bool) -> bool:
        """Count `size` received bytes of the body. Return False if more bytes than content-length
        have arrived, or if the body has `ended` with fewer."""
        assert self.left_bytes is not None
        self.left_bytes -= size
        return self.left_bytes == 0 if ended else self.left_bytes >= 0


@dataclass(slots=True)
class Block:
    """An incomplete header block. CONTINUATION frames add the rest. `count`: the number of frames
    received so far."""

    stream_id: int
    ended: bool
    data: bytearray
    count: int = 1
