"""Reads the headers of an uncompressed tar on disk, as a source of `tar_headers.members`. The
files' data is skipped without reading it."""

from __future__ import annotations

import os


class Growth:
    """Waits for tars that are still being written. `fd`: a pipe that gets a byte when a tar has
    grown, and ends when all are complete."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.ended = False

    def wait(self) -> None:
        """Wait until a tar has grown. If all tars are complete, set `ended` and return at once."""
        if not self.ended and not os.read(self._fd, 4096):
            self.ended = True


class TarFile:
    """Reads a tar through a descriptor, which the caller closes. With `growth` the tar is still
    being written: a read beyond its end waits for the data. Written bytes never change."""

    def __init__(self, fd: int, growth: Growth | None = None) -> None:
        self._fd, self._growth = fd, growth
        self.size_bytes = os.fstat(fd).st_size
        self.position = 0

    def read_exact(self, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end. Raises OSError."""
        self._await(self.position + size)
        data = os.pread(self._fd, size, self.position)
        self.position += len(data)
        return data

    def skip(self, size: int) -> int:
        """Skip `size` bytes, or fewer at the end; return the number of skipped bytes."""
        self._await(self.position + size)
        before = self.position
        self.position = min(before + size, self.size_bytes)
        return self.position - before

    def at(self, offset: int, size: int) -> bytes:
        """Read a part of the content without moving the position. Raises OSError."""
        return os.pread(self._fd, size, offset)

    def complete(self) -> None:
        """Wait until the whole tar is written."""
        self._await(None)

    def _await(self, end: int | None) -> None:
        """Wait until the file has `end` bytes, or is complete."""
        while self._growth is not None and (end is None or self.size_bytes < end):
            # `ended` is read before the size: in between, a tar may grow once more and end.
            ended = self._growth.ended
            self.size_bytes = os.fstat(self._fd).st_size
            if ended:
                self._growth = None
            elif end is None or self.size_bytes < end:
                self._growth.wait()
