"""A pod's level: two categories of its own, which no other pod of this node has.

Records of sandboxes keep them over a restart: a level is free again when no sandbox has it, without
being given back.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator

from pyrunc.errors import ResourceExhausted

TRIES = 10_000


class Levels:
    """The levels of pods that are being made, beside those that exist. `categories`: how many the
    policy has (c0 … cN-1)."""

    def __init__(self, categories: int) -> None:
        self.categories = categories
        self._being_made: set[str] = set()

    @contextlib.contextmanager
    def reserved(self, taken: Collection[str]) -> Iterator[str]:
        """A level that is not in `taken` and that nobody else gets meanwhile. Raises
        ResourceExhausted when all pairs are taken."""
        level = self._choose(taken)
        self._being_made.add(level)
        try:
            yield level
        finally:
            self._being_made.discard(level)

    def _choose(self, taken: Collection[str]) -> str:
        for _ in range(TRIES):
            level = pair(*random.sample(range(self.categories), 2))
            if level not in taken and level not in self._being_made:
                return level
        for first in range(self.categories):
            for second in range(first + 1, self.categories):
                level = pair(first, second)
                if level not in taken and level not in self._being_made:
                    return level
        raise ResourceExhausted(
            f"all pairs of {self.categories} SELinux categories are in use ([selinux] category_range)"
        )


def pair(first: int, second: int) -> str:
    """The level of two categories, in the order that the kernel writes them."""
    low, high = sorted((first, second))
    return f"s0:c{low},c{high}"
