"""Recognizes blocks of zeros. The writers of layer files and tars leave holes in their place, so
that preallocated files and bombs of zeros take no blocks on the disk."""

from __future__ import annotations

_ZEROS = bytes(256 << 10)
_LEAST_BYTES = 4096  # less than a block of the disk leaves no hole


def is_hole(piece: memoryview) -> bool:
    """Return whether `piece` is all zeros and at least 4 KiB, so that a hole can replace it. Return
    False for a piece longer than 256 KiB; decoders never yield more at once."""
    size = len(piece)
    if size < _LEAST_BYTES or piece[0] or piece[-1]:  # most data ends here, uncopied
        return False
    return bytes(piece) == _ZEROS[:size]
