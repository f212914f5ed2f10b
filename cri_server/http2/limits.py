"""Limits of the memory and work that one connection may cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits of one connection.

    `streams`: open at once, including reset ones whose work has not ended. `header_list_bytes`: of
    one request, as SETTINGS_MAX_HEADER_LIST_SIZE counts; beyond it the request is refused.
    `header_block_bytes`, `header_frames`: of one header block as it is sent; beyond them the
    connection is closed. `window_bytes`: the connection's receive window. `resets`: allowance
    (burst, per second) of streams that the peer resets (CVE-2023-44487) or makes this side reset
    (CVE-2025-8671). `controls`: allowance of frames without a request: PING, SETTINGS, empty DATA
    and the like.
    """

    streams: int = 1000
    header_list_bytes: int = 16 << 10
    header_block_bytes: int = 64 << 10
    header_frames: int = 16
    window_bytes: int = 16 << 20
    resets: tuple[int, int] = (400, 100)
    controls: tuple[int, int] = (2000, 500)


class Allowance:
    """A token bucket that bounds frames which cost this side work and the peer next to nothing.

    It starts with `capacity` tokens, its maximum, and regains `per_s` a second of `clock`.
    """

    __slots__ = ("_clock", "_left", "_per_s", "_seen_s", "capacity")

    def __init__(self, capacity: float, per_s: float, clock: Callable[[], float]) -> None:
        self.capacity, self._per_s, self._clock = capacity, per_s, clock
        self._left, self._seen_s = capacity, clock()

    def spend(self, tokens: float = 1) -> bool:
        """Take tokens; return False when too few are left."""
        if self._left < tokens:
            now_s = self._clock()
            self._left = min(self.capacity, self._left + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
        if self._left < tokens:
            return False
        self._left -= tokens
        return True

    def refund(self, tokens: float) -> None:
        """Add tokens, up to the maximum: a proper request pays for the control frames around it."""
        self._left = min(self.capacity, self._left + tokens)
