"""Recognizes zeros, which writers of files leave out, so that preallocated files and bombs of zeros
take no blocks on the disk."""

from __future__ import annotations

_ZEROS = bytes(256 << 10)
_LEAST_BYTES = 4096  # less than a block of the disk leaves no hole


def is_hole(piece: memoryview) -> bool:
    """Return whether the bytes are all zeros, and enough for a hole; False for a piece that is
    longer than a decoder's output."""
    size = len(piece)
    if size < _LEAST_BYTES or piece[0] or piece[-1]:  # most data ends here, uncopied
        return False
    return bytes(piece) == _ZEROS[:size]
