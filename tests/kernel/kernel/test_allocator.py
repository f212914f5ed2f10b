"""Freed memory is allocated again without a page fault after `keep_freed_memory`."""

from __future__ import annotations

import resource
import subprocess
import sys

BLOCK_BYTES, BLOCKS, ROUNDS = 256 << 10, 16, 20
# A new interpreter: the allocator keeps more by itself once something large was freed.
FAULTS = f"""
import resource
from pyrunc.kernel.allocator import keep_freed_memory
%s
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    blocks = [b"x" * {BLOCK_BYTES} for _ in range({BLOCKS})]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(before: str) -> int:
    """Return the number of page faults while blocks are allocated, written and freed repeatedly,
    after the Python code `before` has run."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS % before], stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout)


def test_freed_memory_stays_with_the_process() -> None:
    once = BLOCKS * BLOCK_BYTES // resource.getpagesize()
    assert faults("keep_freed_memory()") < 3 * once
    assert faults("") > 8 * once, "the allocator does that by itself"
