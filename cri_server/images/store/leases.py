"""What pulls and loads hold while it is not yet listed: digests and chain ids that must not be
collected."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

EVERYTHING = "everything"  # a key that is held as digests are


class Leases:
    """Keys with the number of their holders. Any thread may call."""

    def __init__(self) -> None:
        self._keys: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str]) -> None:
        """One more holder of each."""
        with self._lock:
            self._keys.update(keys)

    def remove(self, keys: Iterable[str]) -> None:
        """One holder of each less."""
        with self._lock:
            self._keys.subtract(keys)
            self._keys += Counter()  # drops the zeros

    def current(self) -> set[str]:
        """All that somebody holds."""
        with self._lock:
            return set(self._keys)

    def by_others(self, key: str) -> bool:
        """Whether somebody beside the caller, who holds it, does too."""
        with self._lock:
            return self._keys[key] > 1 or EVERYTHING in self._keys
