"""A span in an entry of the timeline: the ring writes it, the command line draws it."""

from __future__ import annotations

from pyrunc.records import Record


class SpanRecord(Record):
    """`offset_ms`: since the call began. `parent`: the `id` of the span that it is a part of; None:
    a part of the call itself. `failed`: it ended with an error, None if not."""

    id: int
    name: str
    offset_ms: float
    duration_ms: float
    parent: int | None = None
    failed: bool | None = None
