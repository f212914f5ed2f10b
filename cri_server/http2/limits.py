"""Limits of the memory and work that one connection may cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits of one connection.

    - `streams`: number of open streams, including reset ones whose work has not ended.
    - `header_list_bytes`: size of a request's headers, counted as for
      SETTINGS_MAX_HEADER_LIST_SIZE. A larger request is refused.
    - `header_block_bytes`, `header_frames`: bytes and frames of one encoded header block. A larger
      block closes the connection.
    - `window_bytes`: the connection's receive window.
    - `resets`: how many streams the peer may reset (CVE-2023-44487) or make this side reset
      (CVE-2025-8671), as (burst, per second).
    - `controls`: how many frames without a request (PING, SETTINGS, empty DATA …) the peer may
      send, as (burst, per second).
    """

    streams: int = 1000
    header_list_bytes: int = 16 << 10
    header_block_bytes: int = 64 << 10
    header_frames: int = 16
    window_bytes: int = 16 << 20
    resets: tuple[int, int] = (400, 100)
    controls: tuple[int, int] = (2000, 500)


class Allowance:
    """A token bucket that limits the frames that cost the peer next to nothing, but make this side
    work.

    It starts full, with `capacity` tokens, and gains `per_s` tokens per second. `clock` returns the
    time in seconds.
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
        """Add tokens, up to the maximum. Called for each request and each part of a reply, so that
        the control frames which belong to them do not use up the allowance."""
        self._left = min(self.capacity, self._left + tokens)
