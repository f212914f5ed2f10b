"""Counts and durations of calls and of the steps of verbs, measured at all times.

There is no switch, because a measurement costs only 0.5 µs (a search among twenty bounds and two
additions). `telemetry/` exports the numbers, and is loaded only if configured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# Seconds. A status takes a tenth of a millisecond, a pull minutes.
BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


@dataclass(slots=True)
class Durations:
    """A histogram of durations. `counts[i]`: how many were longer than `BOUNDS_S[i - 1]` and at
    most `BOUNDS_S[i]`; the last element counts durations above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration in its bucket."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Meters:
    """Histograms by two names, such as verb and outcome. Callers of the server cannot choose the
    names, so the number of histograms is bounded."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Durations] = {}

    def add(self, name: str, kind: str, seconds: float) -> None:
        """Count a duration in the histogram of (`name`, `kind`), which is created at its first
        use."""
        key = (name, kind)
        # Nearly all keys exist, and Python 3.11 enters a `try` at no cost.
        try:
            self._by_name[key].add(seconds)
        except KeyError:
            durations = self._by_name[key] = Durations()
            durations.add(seconds)

    def items(self) -> list[tuple[tuple[str, str], Durations]]:
        """Return all histograms with their two names, sorted by name."""
        return sorted(self._by_name.items())


VERBS = Meters()
"""Durations of calls, by call and gRPC code, such as (`RunPodSandbox`, `OK`)."""
STEPS = Meters()
"""Durations of successful steps, by verb and step, such as (`run_sandbox`, `network`)."""
EXITS: Counter[str] = Counter()
"""The number of containers that have ended, by CRI reason."""
