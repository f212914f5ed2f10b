"""An uncompressed tar on disk, for `tar_headers.members`: the files' data is passed over unread."""

from __future__ import annotations

import os


class TarFile:
    """The file behind a descriptor, which stays the caller's and must not change."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size_bytes = os.fstat(fd).st_size
        self.position = 0

    def read_exact(self, size: int) -> bytes:
        """`size` bytes; fewer only at the end. Raises OSError."""
        found = os.pread(self._fd, size, self.position)
        self.position += len(found)
        return found

    def pass_over(self, size: int) -> int:
        """Go on behind the next `size` bytes; how many there were."""
        before = self.position
        self.position = min(before + size, self.size_bytes)
        return self.position - before

    def at(self, offset: int, size: int) -> bytes:
        """A part of the content, wherever the position is. Raises OSError."""
        return os.pread(self._fd, size, offset)
