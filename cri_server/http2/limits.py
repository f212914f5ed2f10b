"""What one connection may make this side hold or do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may ask for.

    `streams`: open at once, those whose work still goes on after a reset included.
    `header_list_bytes`: of one request, as SETTINGS_MAX_HEADER_LIST_SIZE counts; beyond it the
    request is refused. `header_block_bytes` and `header_frames`: of one block on the wire; beyond
    them the connection is. `window_bytes`: what may be on its way to us in all. `resets`,
    `controls`: allowances (burst, per second) for streams that end by a reset of the peer
    (CVE-2023-44487) or by an error of it (CVE-2025-8671), and for frames that ask for nothing
    (PING, SETTINGS, empty DATA and the like).
    """

    streams: int = 1000
    header_list_bytes: int = 16 << 10
    header_block_bytes: int = 64 << 10
    header_frames: int = 16
    window_bytes: int = 16 << 20
    resets: tuple[int, int] = (400, 100)
    controls: tuple[int, int] = (2000, 500)


class Allowance:
    """How much is put up with of what costs us work, and a peer next to nothing: a bucket of tokens
    that fills again.

    `capacity` tokens at first and at most; `per_s` come back each second of `clock`."""

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
