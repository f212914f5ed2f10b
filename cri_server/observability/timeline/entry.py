"""The record of a span in the timeline, which the ring writes and the command line draws."""

from __future__ import annotations

from pyrunc.records import Record


class SpanRecord(Record):
    """A span. `offset_ms`: since the call began; `parent`: the `id` of the enclosing span, None for
    the call itself; `failed`: True after an error, else None."""

    id: int
    name: str
    offset_ms: float
    duration_ms: float
    parent: int | None = None
    failed: bool | None = None
