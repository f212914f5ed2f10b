"""A blob on its way to the process that decodes it: blocks of shared memory, and two pipes that say which are full and which are free.

A pipe would copy each byte once more, allocate a page for each 4 KiB, and hold 1 MiB at most: a decoder has used that up in three
milliseconds, before a sender that waits for a processor is back. The process at the other end meets hostile bytes. It cannot write to
the memory (F_SEAL_FUTURE_WRITE) and what it says is free is checked; the sender reads nothing else of it.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections import deque
from contextlib import suppress
from struct import Struct

from pyrunc.abi.file import F_ADD_SEALS, F_SEAL_FUTURE_WRITE, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK
from pyrunc.kernel.fd import close_all, open_memfd

BLOCK_BYTES = 128 << 10
BLOCKS = 16
_FREED_AT_ONCE = 4  # else the sender is woken for each
_FULL = Struct("=II")  # the block's number, the bytes in it
_ALL_FULL_BYTES = BLOCKS * _FULL.size


class Interrupted(Exception):
    """What came through the ring does not count."""


class Ring:
    """The sender's end, for one thread at a time; `receiver` is the other end, which is closed by itself."""

    def __init__(self) -> None:
        """Raises KernelError, OSError."""
        memory = open_memfd("blob")
        opened = [memory]
        try:
            os.ftruncate(memory, BLOCKS * BLOCK_BYTES)
            full, sending = os.pipe2(os.O_CLOEXEC)
            opened += [full, sending]
            hearing, freed = os.pipe2(os.O_CLOEXEC)
            opened += [hearing, freed]
            self._memory = mmap.mmap(memory, BLOCKS * BLOCK_BYTES)
            seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE
            fcntl.fcntl(memory, F_ADD_SEALS, seals)
        except OSError:
            close_all(opened)
            raise
        self.receiver = Receiver(memory, full, freed)
        self._full, self._freed = io.FileIO(sending, "wb"), io.FileIO(hearing, "rb")
        self._free = list(range(BLOCKS))

    def write(self, data: bytes) -> None:
        """Waits for room. Raises Interrupted when nobody receives, or after `close`."""
        view = memoryview(data)
        try:
            while view:
                part, view = view[:BLOCK_BYTES], view[BLOCK_BYTES:]
                number = self._take()
                self._memory[number * BLOCK_BYTES : number * BLOCK_BYTES + len(part)] = part
                self._full.write(_FULL.pack(number, len(part)))
        except (BrokenPipeError, ValueError):  # ValueError: closed, as mmap and io have it
            raise Interrupted from None

    def _take(self) -> int:
        """A free block. Raises Interrupted."""
        if not self._free:
            freed = self._freed.read(BLOCKS) or b""
            if not freed or max(freed) >= BLOCKS or len(set(freed)) < len(freed):
                raise Interrupted
            self._free.extend(freed)
        return self._free.pop()

    def close(self) -> None:
        """The receiver gets the end of the blob behind what was written. Idempotent, from any thread."""
        self._full.close()
        self._freed.close()
        self._memory.close()


class Receiver:
    """The other end, as descriptors: in this process, or passed to another one, which makes it again of them. Ends with `close`."""

    def __init__(self, memory: int, full: int, freed: int) -> None:
        self.fds = (memory, full, freed)
        self._memory: mmap.mmap | None = None
        self._part = memoryview(b"")
        self._arrived: deque[tuple[int, int]] = deque()
        self._used = bytearray()
        self._read: int | None = None

    def read(self) -> memoryview:
        """The next bytes, which can be read until the next call; empty at the end of the blob. Raises OSError."""
        memory, full, _ = self.fds
        if self._memory is None:
            self._memory = mmap.mmap(memory, BLOCKS * BLOCK_BYTES, prot=mmap.PROT_READ)
        self._part.release()
        if self._read is not None:
            self._used.append(self._read)
        if not self._arrived or len(self._used) >= _FREED_AT_ONCE:
            self._tell()
        if not self._arrived:
            self._arrived.extend(_FULL.iter_unpack(os.read(full, _ALL_FULL_BYTES)))
        if not self._arrived:
            self._read = None
            return memoryview(b"")
        self._read, size = self._arrived.popleft()
        at = self._read * BLOCK_BYTES
        with memoryview(self._memory) as whole:
            self._part = whole[at : at + size]
        return self._part

    def _tell(self) -> None:
        if self._used:
            try:
                os.write(self.fds[2], self._used)
            except BrokenPipeError:  # the sender has sent everything
                pass
            self._used.clear()

    def close(self) -> None:
        """Idempotent. A sender that waits gets Interrupted."""
        fds, self.fds = self.fds, (-1, -1, -1)
        close_all(fds)
        with suppress(BufferError):  # a thread that was given up still reads
            self._part.release()
            if self._memory is not None:
                self._memory.close()
