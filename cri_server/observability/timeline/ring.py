"""Stores the calls of the last hours or days: two rotating files of JSON lines, at most 4 MiB.

Entries are collected in a list; a thread writes them every second and before each read. The files
are not synced: after a power cut the last seconds are missing, and a truncated line is skipped.
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
WAITING_LIMIT = 10_000  # entries that wait for a slow disk
FOLLOWER_LIMIT = 1000  # entries that a follower has not read
INTERVAL_S = 1.0

Entry = dict[str, Any]
"""A recorded call: {"call", "started_at_ns", "ended_at_ns", "duration_ms", "outcome", …fields of
the log line, "spans": a list of `SpanRecord`}. A later entry always has a larger `ended_at_ns`.
`traceparent` is present if the caller sent one."""

Follower = asyncio.Queue[tuple[Entry, Trace | None] | None]


class Ring:
    """The recorded calls of the server, in two files in `folder`, which is created with mode
    0700."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._waiting: list[tuple[Entry, Trace | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing = threading.Lock()
        self._followers: set[Follower] = set()
        self._ended_at_ns = 0

    def add(self, entry: Entry, trace: Trace | None = None) -> None:
        """Record a call that has ended: set its `ended_at_ns`, queue it for the next write, and
        send it to followers. Takes a microsecond. Call on the event loop."""
        # The time increases even if the clock is set back: it identifies the last entry that a
        # follower has read (`follow`).
        self._ended_at_ns = entry["ended_at_ns"] = max(time.time_ns(), self._ended_at_ns + 1)
        if len(self._waiting) < WAITING_LIMIT:
            self._waiting.append((entry, trace))
        for follower in list(self._followers):
            self._send(follower, entry, trace)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                INTERVAL_S, lambda: loop.run_in_executor(None, self.flush)
            )

    def _send(self, follower: Follower, entry: Entry, trace: Trace | None) -> None:
        if follower.qsize() < FOLLOWER_LIMIT:
            follower.put_nowait((entry, trace))
        else:
            self._followers.discard(follower)
            follower.put_nowait(None)

    async def follow(self, after_ns: int) -> AsyncGenerator[Entry, None]:
        """Yield the calls that ended after `after_ns`, in order of their end, then new calls, until
        the caller stops. Raises ResourceExhausted when the caller does not keep up."""
        follower: Follower = asyncio.Queue()
        # The follower is added before the file is read, so that no entry is lost; `after_ns` skips
        # those that are in both.
        self._followers.add(follower)
        try:
            ended = [
                e for e in await asyncio.to_thread(self.read) if e.get("ended_at_ns", 0) > after_ns
            ]
            for entry in sorted(ended, key=lambda entry: int(entry["ended_at_ns"])):
                after_ns = entry["ended_at_ns"]
                yield entry
            while (item := await follower.get()) is not None:
                entry, trace = item
                if entry["ended_at_ns"] > after_ns:
                    yield complete(entry, trace)
            raise ResourceExhausted(f"the client is more than {FOLLOWER_LIMIT} calls behind")
        finally:
            self._followers.discard(follower)

    def flush(self) -> None:
        """Append queued calls to the file. If the disk reports an error, the calls are dropped with
        a warning. Blocks: run it in a thread."""
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
                log.warning("the timeline cannot be written: %s", error)

    def _write(self, data: bytes) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / "calls"
        # The file has its mode from its creation on: entries name pods, images and errors.
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            full = file.tell() > self._limit_bytes
        if full:
            path.rename(self._folder / "calls.1")

    def read(self) -> list[Entry]:
        """Read all recorded calls, in order of their start. Blocks: run it in a thread."""
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
                # A power cut may leave an incomplete line; entries are not synced.
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and isinstance(entry.get("started_at_ns"), int):
                        yield entry


def complete(entry: Entry, trace: Trace | None) -> Entry:
    """Return `entry` with the ended spans of `trace` in the key `spans`; without a trace, return
    `entry` unchanged."""
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
