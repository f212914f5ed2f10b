"""Settings of the C library's allocator: mallopt(3)."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # HEAP_MAX_SIZE / 2 of glibc on 64 bits; more is refused
_NEVER = (1 << 31) - 1
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # once, not in each child of a zygote


def keep_freed_memory() -> None:
    """Make malloc reuse freed memory instead of returning it to the kernel. This suits short-lived
    processes. Does nothing if the C library is not glibc."""
    # Otherwise each block of 256 KiB that is freed and allocated again costs 64 page faults, and
    # the kernel clears each page: for a layer of 154 MB 18,000 faults in place of 1,100, and 140 ms
    # of system time in place of 95.
    if _mallopt is not None:
        # Both are set: either one alone turns off glibc's adjustment of both thresholds
        # (mallopt(3)), and the other would then stay at 128 KiB.
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        _mallopt(_M_TRIM_THRESHOLD, _NEVER)
