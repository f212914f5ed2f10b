"""The calls of the last hours or days on disk: two files of JSON lines that take turns, so that at
most 4 MiB are kept.

What happens is only put into a list; a thread writes it once a second and before anybody reads. It
is not synced: after a power cut the last seconds are missing, and a line that was cut off is left
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from cri_server.observability.timeline.entry import SpanRecord
from cri_server.observability.timeline.trace import ROOT, Trace
from pyrunc.errors import ResourceExhausted

log = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 20  # of one file
WAITING_LIMIT = 10_000  # entries that are not written, when the disk does not keep up
FOLLOWER_LIMIT = 1000  # entries that somebody who follows has not read
INTERVAL_S = 1.0

Entry = dict[str, Any]
"""{"call", "started_at_ns", "ended_at_ns", "duration_ms", "outcome", …fields of the log line,
"spans": a list of `SpanRecord`}. `ended_at_ns` is different for each, and grows. `traceparent`: of
who made the call, when it traces itself."""

Follower = asyncio.Queue[tuple[Entry, Trace | None] | None]


class Ring:
    """The entries in `folder`, which is made with mode 0700."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._waiting: list[tuple[Entry, Trace | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing = threading.Lock()
        self._followers: set[Follower] = set()
        self._ended_at_ns = 0

    def add(self, entry: Entry, trace: Trace | None = None) -> None:
        """Remember. Call on the event loop; costs a microsecond."""
        self._ended_at_ns = entry["ended_at_ns"] = max(time.time_ns(), self._ended_at_ns + 1)
        if len(self._waiting) < WAITING_LIMIT:
            self._waiting.append((entry, trace))
        for follower in list(self._followers):
            self._tell(follower, entry, trace)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                INTERVAL_S, lambda: loop.run_in_executor(None, self.flush)
            )

    def _tell(self, follower: Follower, entry: Entry, trace: Trace | None) -> None:
        if follower.qsize() < FOLLOWER_LIMIT:
            follower.put_nowait((entry, trace))
        else:
            self._followers.discard(follower)
            follower.put_nowait(None)

    async def follow(self, after_ns: int) -> AsyncGenerator[Entry, None]:
        """The entries that ended after `after_ns`, as on disk, then those that end, until the
        caller stops. Raises ResourceExhausted for one that does not keep up."""
        follower: Follower = asyncio.Queue()
        self._followers.add(follower)
        try:
            ended = [
                e for e in await asyncio.to_thread(self.read) if e.get("ended_at_ns", 0) > after_ns
            ]
            for entry in sorted(ended, key=lambda entry: int(entry["ended_at_ns"])):
                after_ns = entry["ended_at_ns"]
                yield entry
            while (found := await follower.get()) is not None:
                entry, trace = found
                if entry["ended_at_ns"] > after_ns:
                    yield complete(entry, trace)
            raise ResourceExhausted(f"more than {FOLLOWER_LIMIT} calls were not read")
        finally:
            self._followers.discard(follower)

    def flush(self) -> None:
        """Write what is remembered. Touches the disk; what it refuses is lost, and told once."""
        with self._writing:
            self._timer = None
            waiting, self._waiting = self._waiting, []
            if not waiting:
                return
            try:
                self._write(
                    "".join(json.dumps(complete(*e), default=str) + "\n" for e in waiting).encode()
                )
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
        """All entries, in the order in which they began. Touches the disk."""
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


def complete(entry: Entry, trace: Trace | None) -> Entry:
    """The entry with the spans that have ended."""
    if trace is None:
        return entry
    spans = [
        SpanRecord(
            number,
            span.name,
            offset_ms=round((span.begin_s - trace.begin_s) * 1e3, 3),
            duration_ms=round((span.end_s - span.begin_s) * 1e3, 3),
            parent=span.parent if span.parent != ROOT else None,
            failed=span.failed or None,
        ).to_fields()
        for number, span in sorted(enumerate(trace.spans), key=lambda each: each[1].begin_s)
        if span.end_s
    ]
    return {**entry, "spans": spans}
