"""A span as the files of the timeline store it and the command line reads it."""

from __future__ import annotations

from pyrunc.records import Record


class SpanRecord(Record):
    """A span.

    - `offset_ms`: time from the call's beginning to the span's.
    - `parent`: the `id` of the enclosing span; None if the call itself encloses the span.
    - `failed`: True after an error, else None.
    """

    id: int
    name: str
    offset_ms: float
    duration_ms: float
    parent: int | None = None
    failed: bool | None = None
