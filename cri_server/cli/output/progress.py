"""How far long work is, on stderr, and only where that is a terminal: one line that is written
over, and gone at the end."""

from __future__ import annotations

import os
import shutil
import sys
import time

from cri_server.cli.output.show import printable, size

INTERVAL_S = 0.1
BAR_CELLS = 24


class Progress:
    """A line such as `pulling busybox  fetching  [#####-----]  1.2MB / 4.1MB  850kB/s`. A context
    manager."""

    def __init__(self, label: str, total: int = 0, *, quiet: bool = False) -> None:
        """`total` in bytes, 0 while it is not known."""
        self._label = label
        self._total = total
        self._done = 0
        self._stage = ""
        self._shows = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._drawn_s = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows and self._drawn_s:
            self._write("")

    def add(self, count: int) -> None:
        """`count` bytes more are done."""
        self.set(self._done + count)

    def at(self, stage: str) -> None:
        """What is done now; for work that says nothing else."""
        self.set(self._done, stage=stage)

    def set(self, done: int, total: int | None = None, stage: str | None = None) -> None:
        """So many are done; what is None stays."""
        changed = stage is not None and stage != self._stage
        self._done = done
        self._total = self._total if total is None else total
        self._stage = self._stage if stage is None else stage
        now = time.monotonic()
        if self._shows and (changed or now - self._drawn_s >= INTERVAL_S):
            self._drawn_s = now
            self._write(self._line(now))

    def _line(self, now: float) -> str:
        rate = self._done / max(now - self._began, 0.001)
        parts = [self._label, self._stage]
        if self._total:
            full = min(BAR_CELLS, BAR_CELLS * self._done // self._total)
            parts += [
                f"[{'#' * full}{'-' * (BAR_CELLS - full)}]",
                f"{size(self._done)} / {size(self._total)}",
            ]
        elif self._done:
            parts.append(size(self._done))
        if self._done:
            parts.append(f"{size(int(rate))}/s")
        return "  ".join(filter(None, parts))

    def _write(self, line: str) -> None:
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r\x1b[K{printable(line)[: columns - 1]}")
        sys.stderr.flush()
