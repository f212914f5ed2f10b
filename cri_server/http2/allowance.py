"""How much of what costs a server work, and a client next to nothing, is put up with: a bucket of tokens that fills again."""

from __future__ import annotations

from collections.abc import Callable


class Allowance:
    """`capacity` tokens at first and at most; `per_s` come back each second of `clock`."""

    __slots__ = ("_clock", "_left", "_per_s", "_seen_s", "capacity")

    def __init__(self, capacity: float, per_s: float, clock: Callable[[], float]) -> None:
        self.capacity, self._per_s, self._clock = capacity, per_s, clock
        self._left, self._seen_s = capacity, clock()

    def spend(self, tokens: float = 1) -> bool:
        """Take tokens; False when there are not enough left."""
        if self._left < tokens:
            now_s = self._clock()
            self._left = min(self.capacity, self._left + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
        if self._left < tokens:
            return False
        self._left -= tokens
        return True

    def refund(self, tokens: float) -> None:
        """Give tokens back, for work that was asked for properly."""
        self._left = min(self.capacity, self._left + tokens)
