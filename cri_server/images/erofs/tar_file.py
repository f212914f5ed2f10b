"""An uncompressed tar on disk, for `tar_headers.members`: the files' data is passed over unread."""

from __future__ import annotations

import os


class Growth:
    """What is known of tars that are still being written: a pipe gets a byte when one has grown,
    and ends when all are whole."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.ended = False

    def wait(self) -> None:
        """For the next news; at once when there is none to come."""
        if not self.ended and not os.read(self._fd, 4096):
            self.ended = True


class TarFile:
    """The file behind a descriptor, which stays the caller's. What it has does not change; with
    `growth` more may come."""

    def __init__(self, fd: int, growth: Growth | None = None) -> None:
        self._fd, self._growth = fd, growth
        self.size_bytes = os.fstat(fd).st_size
        self.position = 0

    def read_exact(self, size: int) -> bytes:
        """`size` bytes; fewer only at the end. Raises OSError."""
        self._await(self.position + size)
        data = os.pread(self._fd, size, self.position)
        self.position += len(data)
        return data

    def pass_over(self, size: int) -> int:
        """Go on behind the next `size` bytes; how many there were."""
        self._await(self.position + size)
        before = self.position
        self.position = min(before + size, self.size_bytes)
        return self.position - before

    def at(self, offset: int, size: int) -> bytes:
        """A part of the content, wherever the position is. Raises OSError."""
        return os.pread(self._fd, size, offset)

    def complete(self) -> None:
        """Wait until the file does not grow any more."""
        self._await(None)

    def _await(self, end: int | None) -> None:
        """Until the file has `end` bytes, or as many as it will ever have."""
        while self._growth is not None and (end is None or self.size_bytes < end):
            ended = self._growth.ended
            self.size_bytes = os.fstat(self._fd).st_size
            if ended:
                self._growth = None
            elif end is None or self.size_bytes < end:
                self._growth.wait()
