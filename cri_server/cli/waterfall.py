"""A remembered call as text: a line, and below it one for each of its parts, drawn on the call's own scale."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from cri_server.cli.show import printable

WIDTH = 40
Call = dict[str, Any]
Span = dict[str, Any]


def lines(call: Call, first_ns: int, width: int = 0) -> list[str]:
    """The call's line and those of its parts. `first_ns`: when the first call of all began. `width`: of the terminal, for which
    the names of parts are cut."""
    since_s = (call["started_at_ns"] - first_ns) / 1e9
    error = f": {call['error']}" if call.get("error") else ""
    # What a caller that gave up had begun goes on beyond the call.
    total_ms = max([duration_ms(call), *(s["offset_ms"] + s["duration_ms"] for s in call.get("spans", ()))])
    found = [
        f"{clock(call)} {since_s:+9.3f} s {duration_ms(call):>10.2f} ms  {call['call']} {printable(subject(call))} "
        f"{outcome(call)}{printable(error)}"
    ]
    for depth, span in tree(call.get("spans", ())):
        mark = " !" if span.get("failed") else ""
        bar = _bar(span["offset_ms"], span["duration_ms"], total_ms)
        name = f"{'  ' * depth}{printable(span['name'])}"
        found.append(f"{'':24} {span['duration_ms']:>10.2f} ms  {bar} {_fitting(name, width)}{mark}")
    return found


def _fitting(name: str, width: int) -> str:
    room = width - 24 - 16 - WIDTH - 3
    return name if not width or len(name) <= room else f"{name[: max(room, 10) - 1]}…"


def clock(call: Call) -> str:
    """The time of day at which it began, `22:58:20.881`."""
    at_ns = call["started_at_ns"]
    return time.strftime("%H:%M:%S", time.localtime(at_ns // 10**9)) + f".{at_ns // 10**6 % 1000:03d}"


def subject(call: Call) -> str:
    """What it was about: pod, container, image."""
    return " ".join(str(call[key]) for key in ("pod", "container", "image") if call.get(key))


def outcome(call: Call) -> str:
    """gRPC's code, or how a container ended."""
    return str(call.get("outcome") or f"exit code {call.get('exit_code')}")


def duration_ms(call: Call) -> float:
    return float(call.get("duration_ms", 0))


def tree(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """(depth, span): each followed by its parts, in the order in which they began. One whose parent is not there is the call's."""
    known = {span["id"] for span in spans if "id" in span}
    parts: dict[Any, list[Span]] = {}
    for span in spans:
        parent = span.get("parent")
        parts.setdefault(parent if parent in known and parent != span["id"] else None, []).append(span)

    def below(parent: Any, depth: int) -> Iterator[tuple[int, Span]]:
        for span in parts.pop(parent, ()):
            yield depth, span
            if "id" in span:
                yield from below(span["id"], depth + 1)

    yield from below(None, 0)


def _bar(offset_ms: float, length_ms: float, total_ms: float) -> str:
    """Where in the call, of `WIDTH` cells: at least one is filled."""
    scale = WIDTH / max(total_ms, 0.001)
    begin = min(WIDTH - 1, int(offset_ms * scale))
    length = max(1, min(WIDTH - begin, round(length_ms * scale)))
    return "·" * begin + "█" * length + "·" * (WIDTH - begin - length)
