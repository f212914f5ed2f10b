"""Zeros in what is written to disk become holes: a preallocated file, and a bomb of zeros, take no
blocks."""

from __future__ import annotations

_ZEROS = bytes(256 << 10)
_LEAST_BYTES = 4096  # less than a block of the disk leaves no hole


def is_hole(piece: memoryview) -> bool:
    """Whether the bytes are zeros, and enough of them to be left out of a file. Longer pieces than
    a decoder gives never are."""
    size = len(piece)
    if size < _LEAST_BYTES or piece[0] or piece[-1]:  # most data ends here, uncopied
        return False
    return bytes(piece) == _ZEROS[:size]
