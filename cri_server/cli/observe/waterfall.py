"""A remembered call as text: a line, and below it one for each of its parts, drawn on the call's
own scale."""

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


class Call(Record):
    """What is drawn of an entry of the timeline (`timeline.ring.Entry`)."""

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
    def of_entry(cls, entry: Entry) -> Call:
        """Raises InvalidArgument. Versions before gave spans no ids, and no parents: their places
        do."""
        spans = [{"id": number, **span} for number, span in enumerate(entry.get("spans", ()))]
        return cls.of({**entry, "spans": spans})

    @property
    def took_ms(self) -> float:
        """How long it took, 0 for an event."""
        return self.duration_ms or 0.0


def lines(call: Call, first_ns: int, width: int = 0) -> list[str]:
    """The call's line and those of its parts. `first_ns`: when the first call of all began.
    `width`: of the terminal, for which the names of parts are cut."""
    since_s = (call.started_at_ns - first_ns) / 1e9
    error = f": {call.error}" if call.error else ""
    # What a caller that gave up had begun goes on beyond the call.
    total_ms = max([call.took_ms, *(span.offset_ms + span.duration_ms for span in call.spans)])
    found = [
        f"{clock(call)} {since_s:+9.3f} s {call.took_ms:>10.2f} ms  {call.call} {printable(subject(call))} "
        f"{outcome(call)}{printable(error)}"
    ]
    for depth, span in tree(call.spans):
        mark = " !" if span.failed else ""
        bar = _bar(span.offset_ms, span.duration_ms, total_ms)
        name = f"{'  ' * depth}{printable(span.name)}"
        found.append(f"{'':29} {span.duration_ms:>10.2f} ms  {bar} {_fitting(name, width)}{mark}")
    return found


def _fitting(name: str, width: int) -> str:
    room = width - 29 - 16 - WIDTH - 3
    return name if not width or len(name) <= room else f"{name[: max(room, 10) - 1]}…"


def clock(call: Call) -> str:
    """The time of day at which it began, with the zone's distance from UTC: `22:58:20.881+0100`."""
    at_ns, local = call.started_at_ns, time.localtime(call.started_at_ns // 10**9)
    return f"{time.strftime('%H:%M:%S', local)}.{at_ns // 10**6 % 1000:03d}{time.strftime('%z', local)}"


def subject(call: Call) -> str:
    """What it was about: pod, container, image."""
    return " ".join(name for name in (call.pod, call.container, call.image) if name)


def outcome(call: Call) -> str:
    """gRPC's code, or how a container ended."""
    return call.outcome or f"exit code {call.exit_code}"


def tree(spans: Sequence[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """(depth, span): each followed by its parts, in the order in which they began. One whose parent
    is not there is the call's."""
    known = {span.id for span in spans}
    parts: dict[int | None, list[SpanRecord]] = {}
    for span in spans:
        parent = span.parent if span.parent in known and span.parent != span.id else None
        parts.setdefault(parent, []).append(span)

    def below(parent: int | None, depth: int) -> Iterator[tuple[int, SpanRecord]]:
        for span in parts.pop(parent, ()):
            yield depth, span
            yield from below(span.id, depth + 1)

    yield from below(None, 0)


def _bar(offset_ms: float, length_ms: float, total_ms: float) -> str:
    """Where in the call, of `WIDTH` cells: at least one is filled."""
    scale = WIDTH / max(total_ms, 0.001)
    begin = min(WIDTH - 1, int(offset_ms * scale))
    length = max(1, min(WIDTH - begin, round(length_ms * scale)))
    return "·" * begin + "█" * length + "·" * (WIDTH - begin - length)
