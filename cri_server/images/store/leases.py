"""Leases that running pulls and loads hold on digests and chain ids. Garbage collection
of the store keeps leased content, although no listed image needs it yet."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

EVERYTHING = "everything"  # a lease on this key prevents garbage collection


class Leases:
    """Counts the leases on each key (digest or chain id). Any thread may call."""

    def __init__(self) -> None:
        self._keys: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str]) -> None:
        """Add a lease on each key."""
        with self._lock:
            self._keys.update(keys)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove a lease from each key."""
        with self._lock:
            # Counted, because two pulls may hold the same layer, and each ends on its own.
            self._keys.subtract(keys)
            self._keys += Counter()  # drops the zeros

    def current(self) -> set[str]:
        """Return all keys with a lease."""
        with self._lock:
            return set(self._keys)

    def by_others(self, key: str) -> bool:
        """Return whether the content of `key` stays protected when the caller gives up its lease on
        `key`: by a second lease on `key`, or by any lease on EVERYTHING."""
        with self._lock:
            return self._keys[key] > 1 or EVERYTHING in self._keys
