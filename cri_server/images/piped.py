"""A blob that is used while it arrives, and never is a file: its decoder reads a pipe.

A pipe cannot be taken back. When a download must begin again (another host, a server that ignores ranges), or its reader ends before
it, `Interrupted` says that the blob has to be fetched to a file first: then it is known whose fault it was.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Any

from cri_server.images.content import Incoming
from pyrunc.errors import PeerError

_PIPE_BYTES = 1 << 20  # the default is 64 KiB, and a switch between the processes for each


class Interrupted(Exception):
    """What came through the pipe does not count."""


class PipedBlob(Incoming):
    """What is written goes into a pipe. `write` and `restart` raise Interrupted."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        super().__init__()
        self._pipe = io.FileIO(fd, "wb")

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._pipe.write(view) or 0 :]
        except (BrokenPipeError, ValueError):  # nobody reads; closed
            raise Interrupted from None

    def restart(self) -> None:
        """Forget what was written, which must be nothing. Raises Interrupted."""
        if self.size:
            super().restart()
            raise Interrupted

    def close(self) -> None:
        """The reader gets the end of the file. Idempotent."""
        self._pipe.close()


Pipes = Callable[[], AbstractAsyncContextManager[PipedBlob]]


@asynccontextmanager
async def piped(read: Callable[[int], Coroutine[Any, Any, None]]) -> AsyncIterator[PipedBlob]:
    """Run `read`, which gets the end of a pipe, beside the block, which writes to the other one. The end of the block is the end of
    the file, and `read` is waited for; when the block fails it is cancelled.

    Raises what the block or `read` raises; Interrupted when `read` failed before all was written, unless that was this node's fault.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    blob = PipedBlob(writing)
    try:
        fcntl(reading, F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:  # more than the user may have
        pass
    reader = asyncio.create_task(read(reading))
    reader.add_done_callback(lambda _: os.close(reading))  # a writer that waits gets EPIPE
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
