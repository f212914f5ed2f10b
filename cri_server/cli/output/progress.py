"""A progress line on stderr, overwritten in place and removed at the end. It is shown only on
terminals."""

from __future__ import annotations

import os
import shutil
import sys
import time

from cri_server.cli.output.show import printable, size

INTERVAL_S = 0.1
BAR_CELLS = 24


class ProgressLine:
    """A line such as `pulling busybox fetching [#####-----] 1.2MB / 4.1MB 850kB/s`. A context
    manager, which removes the line at the end."""

    def __init__(self, label: str, total: int = 0, *, quiet: bool = False) -> None:
        """Prepare a line that begins with `label`. `total`: the expected number of bytes, 0 if it
        is unknown; `quiet`: show nothing."""
        self._label = label
        self._total = total
        self._done = 0
        self._stage = ""
        # A dumb terminal does not know the sequences that overwrite a line.
        self._shows = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._drawn_s = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows and self._drawn_s:
            self._write("")

    def add(self, count: int) -> None:
        """Count `count` more bytes as finished."""
        self.set(self._done + count)

    def at(self, stage: str) -> None:
        """Show the name of the current stage."""
        self.set(self._done, stage=stage)

    def set(self, done: int, total: int | None = None, stage: str | None = None) -> None:
        """Set the number of finished bytes, the total and the stage. None leaves total or stage
        unchanged."""
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
