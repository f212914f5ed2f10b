"""Assigns each pod a level: two categories that no other pod of this node has.

The level of a pod is in its sandbox's record, so it survives a restart of the server. Removing the
sandbox frees the level.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator

from pyrunc.errors import ResourceExhausted

TRIES = 10_000


class SelinuxLevels:
    """Assigns levels to new pods. It knows only the levels of pods in creation; callers pass the
    levels of existing pods.

    `categories`: how many categories (c0, c1 and so on) the levels may have. The policy may have
    more.
    """

    def __init__(self, categories: int) -> None:
        self.categories = categories
        self._reserved: set[str] = set()

    @contextlib.contextmanager
    def reserved(self, taken: Collection[str]) -> Iterator[str]:
        """Yield a level that is neither in `taken` nor reserved, and reserve it for the `with`
        block. Raises ResourceExhausted when all pairs of categories are in use."""
        level = self._choose(taken)
        self._reserved.add(level)
        try:
            yield level
        finally:
            self._reserved.discard(level)

    def _choose(self, taken: Collection[str]) -> str:
        # 1024 categories have half a million pairs, so the first try nearly always succeeds. With a
        # small `category_range` the search below finds the last free pairs.
        for _ in range(TRIES):
            level = pair(*random.sample(range(self.categories), 2))
            if level not in taken and level not in self._reserved:
                return level
        for first in range(self.categories):
            for second in range(first + 1, self.categories):
                level = pair(first, second)
                if level not in taken and level not in self._reserved:
                    return level
        raise ResourceExhausted(
            f"all pairs of {self.categories} SELinux categories are in use"
            " ([selinux] category_range)"
        )


def pair(first: int, second: int) -> str:
    """Return the level with two categories, the lower one first, as the kernel writes it."""
    low, high = sorted((first, second))
    return f"s0:c{low},c{high}"
