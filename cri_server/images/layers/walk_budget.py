"""Limits the work of resolving one layer's names, in proportion to the number of its entries.

A tar's entry compresses to a few bytes, but its name may lead over forty links of four thousand
bytes each, or need a hundred directories that the tar does not describe. Limits for each name alone
would leave the sum unbounded.
"""

from __future__ import annotations

from cri_server.images.layers.inflate import BadLayer

FREE_STEPS = 1 << 16  # for each layer: a small one may have a few deep names
STEPS_PER_ENTRY = 48
# Making a directory takes as long as eight steps over existing ones.
DIRECTORY_STEPS = 8


class WalkBudget:
    """Limits the number of steps that it takes to resolve all names of one layer. A step enters one
    directory, or follows one symbolic link. The caller counts the layer's entries in `entries`."""

    def __init__(
        self, free: int = FREE_STEPS, per_entry: int = STEPS_PER_ENTRY, entries: int = 0
    ) -> None:
        self.entries = entries
        self._free, self._per_entry = free, per_entry
        self._used = 0

    def charge(self, steps: int) -> None:
        """Count `steps`. Raises BadLayer when the sum exceeds the limit, which grows with the
        number of entries so far."""
        # Without the sum, 300 names over one link of 4,000 bytes, 1.7 kB of gzip, took 3.5 s.
        self._used += steps
        limit = self._free + self._per_entry * self.entries
        if self._used > limit:
            raise BadLayer(
                f"the layer's names need more than {limit} steps over directories and links"
                f" for {self.entries} entries"
            )
