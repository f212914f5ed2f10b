"""Decodes a blob while it arrives, without a file: the decoder reads the blob from a ring.

`Interrupted` tells the caller to fetch the blob to a file instead, because data that the decoder
has read cannot be taken back. It is raised in two cases: the download must start again (another
host, a server that ignores ranges), or the reader failed early. In the second case the digest of
the file shows whether the registry or the layer is at fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from cri_server.images.formats.digests import SHA256
from cri_server.images.layers.incoming import IncomingBlob
from cri_server.images.layers.ring import Interrupted, Receiver, RingSender, open_ring
from pyrunc.errors import PeerError


class StreamedBlob(IncomingBlob):
    """Writes a blob into a ring. `write` raises Interrupted after `interrupt`, and when the reader
    has closed its end."""

    def __init__(self, sender: RingSender, algorithm: str) -> None:
        """Take over `sender`; `close` closes it."""
        super().__init__(algorithm)
        self._sender = sender
        self._is_interrupted = False
        self.is_closed = False  # nothing arrives any more

    def interrupt(self) -> None:
        """Make the next `write` raise Interrupted. May be called from any thread."""
        self._is_interrupted = True

    def _put(self, data: bytes) -> None:
        if self._is_interrupted:
            raise Interrupted
        self._sender.write(data)

    def restart(self) -> None:
        """Do nothing if no bytes were written yet; else raise Interrupted, because the reader has
        the bytes already."""
        if self.size:
            super().restart()
            raise Interrupted

    def close(self) -> None:
        """Close the ring, which ends the blob for the reader. Idempotent."""
        self.is_closed = True
        self._sender.close()


OpenStream = Callable[[], AbstractAsyncContextManager[StreamedBlob]]


@asynccontextmanager
async def streamed(
    read: Callable[[Receiver], Coroutine[Any, Any, None]], algorithm: str = SHA256
) -> AsyncIterator[StreamedBlob]:
    """Run `read`, which reads a blob from a ring, while the `with` block writes the blob into the
    ring through the yielded StreamedBlob. The blob ends with the block; then wait for the end of
    `read`. If the block fails, cancel `read`. `algorithm`: the hash algorithm of the blob's digest.

    Raises the errors of the block and of `read`. But if `read` fails with a PeerError before the
    whole blob is written, Interrupted is raised. The caller then fetches the blob to a file, whose
    digest shows whether the registry is at fault.
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
        # asyncio would log an exception that was never retrieved.
        if not reader.cancelled():
            reader.exception()
