"""Passes a blob to another process through blocks of shared memory; two pipes carry the numbers of
full and of freed blocks.

A pipe for the content would copy each byte once more, allocate a page for each 4 KiB, and hold at
most 1 MiB. A decoder reads 1 MiB in three milliseconds, and would then idle until a waiting sender
is scheduled again.

Either end may be a decoder process that a hostile blob controls. A receiver cannot write to the
memory (F_SEAL_FUTURE_WRITE); the sender reads only block numbers from the receiver, and checks
them. A hostile sender could change a block while the receiver uses it, so a receiver copies each
block, and never reads beyond the blocks.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections import deque
from contextlib import suppress
from struct import Struct

from pyrunc.abi.file import (
    F_ADD_SEALS,
    F_SEAL_FUTURE_WRITE,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
)
from pyrunc.kernel.fd import close_all, closing_fd, open_memfd

BLOCK_BYTES = 128 << 10
BLOCKS = 16
_MEMORY_BYTES = BLOCKS * BLOCK_BYTES
_FREED_AT_ONCE = 4  # so that not every block wakes the sender
_FULL = Struct("=II")  # the block's number and its bytes; 0 bytes end the blob
_ALL_FULL_BYTES = BLOCKS * _FULL.size
_SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW

Ends = tuple[int, int, int]
"""Descriptors of a ring: the memory, the pipe of full blocks, the pipe of freed blocks."""


class Interrupted(Exception):
    """The transfer ended early; the data received so far must not be used."""


def open_ends() -> tuple[Ends, Ends]:
    """Open a ring between two other processes; return the descriptors for the sender and for the
    receiver. The caller must close them all. Raises KernelError, OSError."""
    return _open_ends(_SIZE_SEALS | F_SEAL_SEAL)


def open_ring() -> tuple[RingSender, Receiver]:
    """Open a ring with a sender in this process, and a receiver whose process cannot write to the
    memory. Raises KernelError, OSError."""
    sending, receiving = _open_ends(_SIZE_SEALS)
    # The seal does not affect the sender's mapping, because it exists already.
    sender, receiver = RingSender(*sending), Receiver(*receiving)
    # Linux 5.1. F_SEAL_WRITE would fail: the sender has a writable mapping (fcntl(2)).
    fcntl.fcntl(receiving[0], F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
    return sender, receiver


def _open_ends(seals: int) -> tuple[Ends, Ends]:
    opened = [open_memfd("blob")]
    try:
        opened.append(fcntl.fcntl(opened[0], fcntl.F_DUPFD_CLOEXEC, 0))
        os.ftruncate(opened[0], _MEMORY_BYTES)
        fcntl.fcntl(opened[0], F_ADD_SEALS, seals)
        opened += os.pipe2(os.O_CLOEXEC)
        opened += os.pipe2(os.O_CLOEXEC)
    except OSError:
        close_all(opened)
        raise
    memory, again, full_reader, full_writer, freed_reader, freed_writer = opened
    return (memory, full_writer, freed_reader), (again, full_reader, freed_writer)


class RingSender:
    """Writes a blob to a ring. Use from one thread at a time."""

    def __init__(self, memory: int, full: int, freed: int) -> None:
        """Take over the ring's descriptors: the memory, the pipe of full blocks, the pipe of freed
        blocks. Raises OSError."""
        self._full, self._freed = io.FileIO(full, "wb"), io.FileIO(freed, "rb")
        self._free = list(range(BLOCKS))
        with closing_fd(memory):
            self._memory = mmap.mmap(memory, _MEMORY_BYTES)

    def write(self, data: bytes | memoryview) -> None:
        """Send data, waiting for free blocks. Raises Interrupted when this end or the receiver is
        closed."""
        view = memoryview(data)
        try:
            while view:
                part, view = view[:BLOCK_BYTES], view[BLOCK_BYTES:]
                number = self._take()
                self._memory[number * BLOCK_BYTES : number * BLOCK_BYTES + len(part)] = part
                self._full.write(_FULL.pack(number, len(part)))
        except (BrokenPipeError, ValueError):  # ValueError: closed, as mmap and io have it
            raise Interrupted from None

    def finish(self) -> None:
        """Mark the end of the blob, so that the receiver need not wait for `close` or the end of
        this process. Raises Interrupted."""
        try:
            self._full.write(_FULL.pack(0, 0))
        except (BrokenPipeError, ValueError):
            raise Interrupted from None

    def _take(self) -> int:
        """Wait for a free block and return its number. Raises Interrupted."""
        if not self._free:
            freed = self._freed.read(BLOCKS) or b""
            if not freed or max(freed) >= BLOCKS or len(set(freed)) < len(freed):
                raise Interrupted
            self._free.extend(freed)
        return self._free.pop()

    def close(self) -> None:
        """Close the sender's descriptors. The receiver can still read the data written, and then
        gets the end of the blob. Idempotent, from any thread."""
        self._full.close()
        self._freed.close()
        self._memory.close()


class Receiver:
    """Reads a blob from a ring. Its descriptors `fds` may be sent to another process, which makes
    its own Receiver of them. The caller must call `close`."""

    def __init__(self, memory: int, full: int, freed: int, *, copying: bool = False) -> None:
        """Take over the ring's descriptors: the memory, the pipe of full blocks, the pipe of freed
        blocks. `copying`: `read` returns copies of the blocks, because the sender can still change
        the memory. Without `copying`, it returns views of the memory."""
        self.fds = (memory, full, freed)
        self._copying = copying
        self._memory: mmap.mmap | None = None
        self._part = memoryview(b"")
        self._arrived: deque[tuple[int, int]] = deque()
        self._used = bytearray()
        self._read: int | None = None

    def map(self) -> None:
        """Map the ring's memory now, not at the first `read`. A decoder must call this before it
        enters its jail, which refuses to map files. Raises OSError."""
        self._memory = mmap.mmap(self.fds[0], _MEMORY_BYTES, prot=mmap.PROT_READ)

    def read(self) -> memoryview:
        """Return the next bytes, valid until the next call; empty at the end of the blob. Raises
        OSError."""
        if self._memory is None:
            self.map()
        assert self._memory is not None
        self._part.release()
        if self._read is not None:
            self._used.append(self._read)
            self._read = None
        if not self._arrived or len(self._used) >= _FREED_AT_ONCE:
            self._report_freed()
        if not self._arrived:
            self._arrived.extend(_FULL.iter_unpack(os.read(self.fds[1], _ALL_FULL_BYTES)))
        if not self._arrived or not self._arrived[0][1]:
            return memoryview(b"")
        number, size = self._arrived.popleft()
        number, size = number % BLOCKS, min(size, BLOCK_BYTES)
        self._read, at = number, number * BLOCK_BYTES
        if self._copying:
            self._part = memoryview(self._memory[at : at + size])
        else:
            with memoryview(self._memory) as whole:
                self._part = whole[at : at + size]
        return self._part

    def _report_freed(self) -> None:
        if self._used:
            try:
                os.write(self.fds[2], self._used)
            except BrokenPipeError:  # the sender has sent everything
                pass
            self._used.clear()

    def close(self) -> None:
        """Close this end; a waiting sender gets Interrupted. Idempotent."""
        fds, self.fds = self.fds, (-1, -1, -1)
        close_all(fds)
        with suppress(BufferError):  # an abandoned thread still reads
            self._part.release()
            if self._memory is not None:
                self._memory.close()
