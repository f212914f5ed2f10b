"""Measures the stages of an operation, for the server's timeline. Stages are always measured,
because each costs only one read of the clock."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = tuple[str, float, float, int]


class Timings:
    """Measured stages of an operation. `noted`: (name, begin, end, index of the enclosing stage or
    -1) for each stage, in seconds of CLOCK_MONOTONIC. An enclosing stage comes before the stages in
    it."""

    __slots__ = ("_last_s", "noted")

    def __init__(self) -> None:
        self.noted: list[Part] = []
        self._last_s = time.perf_counter()

    def end(self, name: str) -> None:
        """Note the stage `name`, which began when the last stage ended."""
        now_s = time.perf_counter()
        self.noted.append((name, self._last_s, now_s, -1))
        self._last_s = now_s

    def include(self, parts: Sequence[Part]) -> None:
        """Append stages that were measured elsewhere. The next stage begins now."""
        shift = len(self.noted)
        for name, begin_s, end_s, parent in parts:
            self.noted.append((name, begin_s, end_s, parent + shift if parent >= 0 else -1))
        self._last_s = time.perf_counter()


def of_launch(
    started_ns: int, times: Sequence[tuple[str, int]], texts: dict[str, str]
) -> list[Part]:
    """Return the stages of a launch and, within a stage, each timed line of the plan. The times are
    wrong if the clock was set during the launch.

    - `started_ns`: when the launch began, in ns of CLOCK_REALTIME
    - `times`: (label, ns of CLOCK_REALTIME), as `launch.run.launch_steps` records them
    - `texts`: number of a line -> its text
    """
    shift_ns = time.monotonic_ns() - time.time_ns()
    stages: list[Part] = []
    before_ns = started_ns
    for label, now_ns in times:
        if label in STAGES:
            stages.append(
                (STAGES[label], (before_ns + shift_ns) / 1e9, (now_ns + shift_ns) / 1e9, -1)
            )
            before_ns = now_ns
    parts, before_ns = stages[:], started_ns
    for label, now_ns in sorted(times, key=lambda each: each[1]):
        if label not in STAGES:
            begin_s, end_s = (before_ns + shift_ns) / 1e9, (now_ns + shift_ns) / 1e9
            around = [n for n, (_, _, end, _) in enumerate(stages) if end_s <= end]
            parts.append(
                (f"{label} {texts.get(label, '')}".strip(), begin_s, end_s, (around or [-1])[0])
            )
        before_ns = max(before_ns, now_ns) if label != CLONED else before_ns
    return parts


SPAWNED, CLONED, RUNS = "spawn", "clone", "exec"
STAGES = {SPAWNED: "spawn the launcher", CLONED: "clone the process", RUNS: "set it up and execute"}
"""The stages that `launch.run` records for every launch: label -> text for people."""
