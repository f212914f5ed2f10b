"""Reads and writes non-blocking descriptors (pipes, sockets, pty masters) on the event loop.

Each function tries the system call first, and waits only after EAGAIN. A descriptor may have one
waiting reader and one waiting writer. A cancelled call leaves nothing registered. Nothing is
buffered here.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

READ_BYTES = 64 * 1024


async def readable(fd: int) -> None:
    """Wait until a read would not block: there is data, the stream has ended, or the read would
    fail."""
    loop = asyncio.get_running_loop()
    await _ready(fd, loop.add_reader, loop.remove_reader)


async def writable(fd: int) -> None:
    """Wait until a write would not block: there is space, or the write would fail."""
    loop = asyncio.get_running_loop()
    await _ready(fd, loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(fd, _wake, ready)
    try:
        await ready
    finally:
        remove(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def read_some(fd: int, limit_bytes: int = READ_BYTES) -> bytes:
    """Read at least one and at most `limit_bytes` bytes; return empty bytes at the end of the
    stream.

    EIO (of a pty's master after the last slave is closed) and ECONNRESET count as the end.
    """
    while True:
        try:
            return os.read(fd, limit_bytes)
        except BlockingIOError:
            await readable(fd)
        except OSError as error:
            # Linux answers EIO once the other end of a pty is closed and its data read (n_tty_read
            # in drivers/tty/n_tty.c), where a pipe ends with an empty read.
            if error.errno in (errno.EIO, errno.ECONNRESET):
                return b""
            raise


async def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`. If the reading end is closed, raises BrokenPipeError or
    ConnectionResetError, or OSError with EIO on a pty."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await writable(fd)
