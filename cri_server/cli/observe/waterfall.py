"""Formats a call of the timeline as text: a line for the call, and a line for each of its steps,
with a bar that shows when the step ran."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cri_server.cli.output.show import printable
from cri_server.observability.timeline.entry import SpanRecord
from pyrunc.records import Record

if TYPE_CHECKING:
    from cri_server.observability.timeline.ring import Entry

WIDTH = 40


class TimelineCall(Record):
    """A call or another event of the timeline, with the fields of `timeline.ring.Entry` that the
    commands show."""

    call: str
    started_at_ns: int
    duration_ms: float | None = None
    outcome: str | None = None
    exit_code: int | None = None
    error: str | None = None
    pod: str | None = None
    container: str | None = None
    image: str | None = None
    spans: Sequence[SpanRecord] = ()

    @classmethod
    def of_entry(cls, entry: Entry) -> TimelineCall:
        """Convert a timeline entry. Raises InvalidArgument if a field is missing or has a wrong
        type. A span that a previous version wrote without an `id` gets its index as id."""
        spans = [{"id": number, **span} for number, span in enumerate(entry.get("spans", ()))]
        return cls.of({**entry, "spans": spans})

    @property
    def took_ms(self) -> float:
        """Return the call's duration in milliseconds; 0 for an event, which has no duration."""
        return self.duration_ms or 0.0


def lines(call: TimelineCall, first_ns: int, width: int = 0) -> list[str]:
    """Return the lines of a call and its steps. `first_ns`: when the first call of the list began,
    in nanoseconds since 1970. `width`: the terminal's columns, 0 for no limit; a step's name is
    shortened if its line is longer."""
    since_s = (call.started_at_ns - first_ns) / 1e9
    error = f": {call.error}" if call.error else ""
    # Steps may continue after the end of a call that was cancelled.
    total_ms = max([call.took_ms, *(span.offset_ms + span.duration_ms for span in call.spans)])
    result = [
        f"{clock(call)} {since_s:+9.3f} s {call.took_ms:>10.2f} ms  {call.call}"
        f" {printable(subject(call))} {outcome(call)}{printable(error)}"
    ]
    for depth, span in tree(call.spans):
        mark = " !" if span.failed else ""
        bar = _bar(span.offset_ms, span.duration_ms, total_ms)
        name = f"{'  ' * depth}{printable(span.name)}"
        result.append(f"{'':29} {span.duration_ms:>10.2f} ms  {bar} {_fitting(name, width)}{mark}")
    return result


def _fitting(name: str, width: int) -> str:
    room = width - 29 - 16 - WIDTH - 3
    return name if not width or len(name) <= room else f"{name[: max(room, 10) - 1]}…"


def clock(call: TimelineCall) -> str:
    """Return the local time at which the call began, such as `22:58:20.881+0100`."""
    local = time.localtime(call.started_at_ns // 10**9)
    milliseconds = call.started_at_ns // 10**6 % 1000
    return time.strftime(f"%H:%M:%S.{milliseconds:03d}%z", local)


def subject(call: TimelineCall) -> str:
    """Return the names of the call's pod, container and image; a call may lack any of them."""
    return " ".join(name for name in (call.pod, call.container, call.image) if name)


def outcome(call: TimelineCall) -> str:
    """Return the gRPC code of a call, or `exit code N` for the exit of a container."""
    return call.outcome or f"exit code {call.exit_code}"


def tree(spans: Sequence[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """Yield (depth, span) for each span of a call, followed by its child spans. A span whose parent
    is unknown has depth 0."""
    ids = {span.id for span in spans}
    parts: dict[int | None, list[SpanRecord]] = {}
    for span in spans:
        parent = span.parent if span.parent in ids and span.parent != span.id else None
        parts.setdefault(parent, []).append(span)

    def below(parent: int | None, depth: int) -> Iterator[tuple[int, SpanRecord]]:
        for span in parts.pop(parent, ()):
            yield depth, span
            yield from below(span.id, depth + 1)

    yield from below(None, 0)


def _bar(offset_ms: float, length_ms: float, total_ms: float) -> str:
    """Return a bar of WIDTH characters that shows when a step ran within its call. At least one
    character is filled."""
    scale = WIDTH / max(total_ms, 0.001)
    begin = min(WIDTH - 1, int(offset_ms * scale))
    length = max(1, min(WIDTH - begin, round(length_ms * scale)))
    return "·" * begin + "█" * length + "·" * (WIDTH - begin - length)
