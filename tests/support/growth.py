"""Measures how the work of a parser grows with its input: the CPU time for one input against that
for an input of twice the size.

Linear work doubles, quadratic work quadruples; the limit lies between. The CPU time of this process
does not contain the work of other processes, and the least of several rounds contains little of
their disturbance (caches, a second thread of the core).

The time of linear work jumps once, where memory no longer fits a cache or an allocator's arena.
Therefore work that grows too fast between two sizes is measured again between the next sizes or, at
the input's limit, between smaller ones. Quadratic work fails at every size.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], object]

FACTOR_LIMIT = 2.5
MEASURABLE_S, CHEAP_S = 0.008, 0.03
ROUNDS = 12
DOUBLINGS = 3


class GrowsTooFast(AssertionError):
    """The work on twice the input is more than `FACTOR_LIMIT` times as much."""


def check_growth(prepare: Callable[[int], Work], size: int, *, largest: int = 1 << 14) -> None:
    """Fail unless the work on an input of twice the size is less than `FACTOR_LIMIT` times as much.

    - `prepare(size)`: builds an input and returns the work on it, which is done once.
    - `size`: the size at which the measurement begins.
    - `largest`: the size above which the parser refuses the input or needs more than 16 MiB.
    """
    # `largest` has this limit because glibc returns memory at once from 32 MiB on, so that each
    # piece of work would begin with page faults.
    small = _cpu_s(prepare(size))
    # A size that is too quick to be measured is doubled, up to the input's own limit: work that is
    # this cheap at the limit is no attack.
    while small < MEASURABLE_S and size * 4 <= largest:
        size *= 2
        small = _cpu_s(prepare(size))
    sizes = [size << n for n in range(DOUBLINGS) if size << (n + 2) <= largest or n == 0]
    failures = []
    for first in sizes:
        small, large = _least(prepare, first)
        if large < CHEAP_S or large < FACTOR_LIMIT * small:
            return
        failures.append(
            f"{small * 1e3:.1f} ms of CPU for {first}, {large * 1e3:.1f} ms for {2 * first}"
        )
    if len(sizes) == 1:  # at the limit: compare with half the size, where cheap work proves nothing
        small, large = _least(prepare, size // 2)
        if large < FACTOR_LIMIT * small:
            return
    raise GrowsTooFast("; ".join(failures))


def _least(prepare: Callable[[int], Work], size: int) -> tuple[float, float]:
    """Return the CPU seconds for `size` and for twice `size`: the least of as many rounds as a
    decision needs, at most ROUNDS."""
    # Both sizes are measured in turns, so that a slow phase of the machine affects both.
    small, large = _cpu_s(prepare(size)), _cpu_s(prepare(2 * size))
    for _ in range(ROUNDS):
        if large < FACTOR_LIMIT * small:
            break
        small = min(small, _cpu_s(prepare(size)))
        large = min(large, _cpu_s(prepare(2 * size)))
    return small, large


def _cpu_s(work: Work) -> float:
    with _no_collection():
        begin = time.process_time()
        work()
        return time.process_time() - begin


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn Python's garbage collector off: its pauses depend on all other objects of this
    process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
