"""Measures which part of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path


def cached_pages(path: Path) -> int:
    """Return the number of pages of the file in memory (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        area = ctypes.c_void_p(
            libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        )
    try:
        assert libc.mincore(area, ctypes.c_size_t(size), pages) == 0
        return sum(page & 1 for page in pages)
    finally:
        libc.munmap(area, ctypes.c_size_t(size))
