"""The calls of the last hours or days on disk: two files of JSON lines that take turns, so that at most 4 MiB are kept.

What happens is only put into a list; a thread writes it once a second and before anybody reads. It is not synced: after a power
cut the last seconds are missing, and a line that was cut off is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cri_server.timeline.trace import Trace

log = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 20  # of one file
WAITING_LIMIT = 10_000  # entries that are not written, when the disk does not keep up
INTERVAL_S = 1.0

Entry = dict[str, Any]
"""{"call", "started_at_ns", "duration_ms", "outcome", …fields, "spans": [{"name", "offset_ms", "duration_ms", "failed"?}]}"""


class Ring:
    """The entries in `folder`, which is made with mode 0700."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._waiting: list[tuple[Entry, Trace | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing = threading.Lock()

    def add(self, entry: Entry, trace: Trace | None = None) -> None:
        """Remember. Call on the event loop; costs a microsecond."""
        if len(self._waiting) < WAITING_LIMIT:
            self._waiting.append((entry, trace))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(INTERVAL_S, lambda: loop.run_in_executor(None, self.flush))

    def flush(self) -> None:
        """Write what is remembered. Touches the disk; what it refuses is lost, and told once."""
        with self._writing:
            self._timer = None
            waiting, self._waiting = self._waiting, []
            if not waiting:
                return
            try:
                self._write("".join(_line(*each) for each in waiting).encode())
            except OSError as error:
                log.warning("the timeline could not be written: %s", error)

    def _write(self, data: bytes) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / "calls"
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            full = file.tell() > self._limit_bytes
        if full:
            path.rename(self._folder / "calls.1")

    def read(self) -> list[Entry]:
        """All entries, oldest first. Touches the disk."""
        self.flush()
        with self._writing:
            return sorted(self._lines(), key=lambda entry: int(entry["started_at_ns"]))

    def _lines(self) -> Iterator[Entry]:
        for name in ("calls.1", "calls"):
            try:
                content = (self._folder / name).read_bytes()
            except FileNotFoundError:
                continue
            for line in content.splitlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and isinstance(entry.get("started_at_ns"), int):
                        yield entry


def _line(entry: Entry, trace: Trace | None) -> str:
    if trace is not None:
        entry["spans"] = [
            {
                "name": span.name,
                "offset_ms": round((span.begin_s - trace.begin_s) * 1e3, 2),
                "duration_ms": round((span.end_s - span.begin_s) * 1e3, 2),
                **({"failed": True} if span.failed else {}),
            }
            for span in sorted(trace.spans, key=lambda span: span.begin_s)
        ]
    return json.dumps(entry, default=str) + "\n"
