"""A blob that is used while it arrives, and never is a file: its decoder reads it from a ring.

What the decoder has read cannot be taken back. When a download must begin again (another host, a
server that ignores ranges), or its reader ends before it, `Interrupted` says that the blob has to
be fetched to a file first: then it is known whose fault it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from cri_server.images.formats.digests import SHA256
from cri_server.images.layers.ring import Interrupted, Receiver, Sender, open_ring
from cri_server.images.store.blobs import Incoming
from pyrunc.errors import PeerError


class StreamedBlob(Incoming):
    """What is written goes into a ring. `write` and `restart` raise Interrupted."""

    def __init__(self, sender: Sender, algorithm: str) -> None:
        """Takes it over."""
        super().__init__(algorithm)
        self._sender = sender
        self._is_interrupted = False
        self.is_closed = False  # nothing arrives any more

    def interrupt(self) -> None:
        """The next `write` raises Interrupted. Any thread may call."""
        self._is_interrupted = True

    def _put(self, data: bytes) -> None:
        if self._is_interrupted:
            raise Interrupted
        self._sender.write(data)

    def restart(self) -> None:
        """Forget what was written, which must be nothing. Raises Interrupted."""
        if self.size:
            super().restart()
            raise Interrupted

    def close(self) -> None:
        """The reader gets the end of the blob. Idempotent."""
        self.is_closed = True
        self._sender.close()


OpenStream = Callable[[], AbstractAsyncContextManager[StreamedBlob]]


@asynccontextmanager
async def streamed(
    read: Callable[[Receiver], Coroutine[Any, Any, None]], algorithm: str = SHA256
) -> AsyncIterator[StreamedBlob]:
    """Run `read`, which gets one end of a ring, beside the block, which writes to the other one.
    The end of the block is the end of the blob, and `read` is waited for; when the block fails it
    is cancelled. `algorithm`: of the blob's digest.

    Raises what the block or `read` raises; Interrupted when `read` failed before all was
    written, unless that was this node's fault.
    """
    sender, receiver = open_ring()
    blob = StreamedBlob(sender, algorithm)
    reader = asyncio.create_task(read(receiver))
    reader.add_done_callback(lambda _: receiver.close())  # a writer that waits is interrupted
    try:
        yield blob
        blob.close()
        await reader
    except Interrupted:
        error = reader.exception() if reader.done() and not reader.cancelled() else None
        if error is not None and not isinstance(error, PeerError):
            raise error from None
        raise
    finally:
        blob.close()
        reader.cancel()
        await asyncio.wait([reader])
        if not reader.cancelled():
            reader.exception()
