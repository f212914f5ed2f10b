"""Formats calls of the timeline as an HTML page: one file with styles and SVG, which loads nothing
and contains no scripts.

Each call is a `details` element with its waterfall. All text is escaped and the page's
Content-Security-Policy forbids scripts, because users of the cluster choose the names on the page.
Each bar also has a text for screen readers.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyrunc
from cri_server.cli.observe.waterfall import TimelineCall, clock, outcome, subject, tree
from cri_server.cli.output.show import printable
from cri_server.observability.timeline.entry import SpanRecord

ROW, HEAD = 22, 24  # pixels
NAME_PERCENT, TOOK_PERCENT = 36, 9  # of the width: names at the left, durations at the right
NAME_LIMIT = 50  # characters of a name, two fewer at each depth; the rest is in its tooltip
TICKS = 4
LEAST_PERCENT = 0.5  # the least width of a bar in percent of the axis, so that it is visible
OPEN_LIMIT = 12  # pages with at most so many calls show their steps
MOST = 0.5  # a step with at least this share of the call's time is named

STYLE = Path(__file__).with_name("waterfall.css").read_text()


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis of all calls: its start in nanoseconds since 1970, and its length in
    nanoseconds."""

    begin_ns: int
    length_ns: int

    @classmethod
    def of(cls, calls: Sequence[TimelineCall]) -> Axis:
        begin = min(call.started_at_ns for call in calls)
        return cls(
            begin,
            max(max(call.started_at_ns + int(call.took_ms * 1e6) for call in calls) - begin, 1),
        )

    def percent(self, call: TimelineCall) -> tuple[float, float]:
        """Return where the bar of a call begins on the axis, and its width, in percent. The width
        is at least LEAST_PERCENT."""
        width = max(100 * call.took_ms * 1e6 / self.length_ns, LEAST_PERCENT)
        return min(100 * (call.started_at_ns - self.begin_ns) / self.length_ns, 100 - width), width


def page(pod: str, calls: Sequence[TimelineCall]) -> str:
    """Return the HTML page. `calls`: at least one call, in the order of display; `pod`: the pod's
    name for the title, empty for all pods."""
    title = f"Timeline of {_text(pod)}" if pod else "Timeline of all pods"
    axis = Axis.of(calls)
    body = "\n".join(_call(call, axis, unfolded=len(calls) <= OPEN_LIMIT) for call in calls)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{_summary(calls, axis)}</p>
{body}
</main>
<footer>pyrunc-cri {escape(pyrunc.__version__)}. The bars beside the calls share a time axis of
{_span_of(axis.length_ns / 1e9)}; the bars of a call's steps have their own scale.</footer>
</body>
</html>
"""


def _summary(calls: Sequence[TimelineCall], axis: Axis) -> str:
    day = datetime.datetime.fromtimestamp(axis.begin_ns / 1e9).astimezone()
    slowest = max(calls, key=lambda call: call.took_ms)
    failed = sum(_failed(call) for call in calls)
    count = f"{len(calls)} call{'s' if len(calls) != 1 else ''}"
    parts = [
        f"{count} from {day:%Y-%m-%d %H:%M:%S %Z} on, in {_span_of(axis.length_ns / 1e9)}",
        f"the slowest is {_text(slowest.call)} with {_ms(slowest.took_ms)}",
        *([f"{failed} failed"] if failed else []),
    ]
    return escape("; ".join(parts), quote=False) + "."


def _call(call: TimelineCall, axis: Axis, *, unfolded: bool) -> str:
    """Return the HTML of a call; a click shows or hides the call's steps. `unfolded`: whether the
    page shows the steps when it opens."""
    spans = list(tree(call.spans))
    at, width = axis.percent(call)
    classes = " ".join(
        name for name, holds in (("failed", _failed(call)), ("bare", not spans)) if holds
    )
    scale = (
        f'<svg class="scale" aria-hidden="true"><rect class="{"fail" if _failed(call) else "bar"}" '
        f'x="{at:.2f}%" width="{width:.2f}%" height="8" rx="2"/></svg>'
    )
    took = _ms(call.took_ms) if call.duration_ms is not None else ""
    summary = (
        f'<summary><span class="when">{clock(call)}</span>'
        f' <span class="call">{_text(call.call)}</span>'
        f' <span class="about">{_text(subject(call))}'
        f' <span class="outcome">{_text(outcome(call))}</span></span>'
        f' {scale} <span class="number">{took}</span></summary>'
    )
    error = f'<p class="error">{_text(call.error)}</p>' if call.error else ""
    most = _most(call)
    mostly = f'<p class="most">{_text(most)}</p>' if most else ""
    open_attribute = " open" if spans and (unfolded or _failed(call)) else ""
    inside = f"{error}{mostly}{_waterfall(call, spans) if spans else ''}"
    return f'<details class="{classes}"{open_attribute}>{summary}{inside}</details>'


def _waterfall(call: TimelineCall, spans: Sequence[tuple[int, SpanRecord]]) -> str:
    total_ms = max(call.took_ms, max(span.offset_ms + span.duration_ms for _, span in spans), 0.001)
    height = HEAD + ROW * len(spans) + 4
    place = f'x="{NAME_PERCENT}%" width="{100 - NAME_PERCENT - TOOK_PERCENT}%"'
    ticks = "".join(_tick(number, total_ms, height) for number in range(TICKS + 1))
    stripes = "".join(
        f'<rect class="stripe" y="{HEAD + ROW * number}" width="100%" height="{ROW}"/>'
        for number in range(1, len(spans), 2)
    )
    rows = "".join(
        _row(number, depth, span, total_ms, place) for number, (depth, span) in enumerate(spans)
    )
    label = f"Steps of {_text(call.call)}, {_ms(call.took_ms)}"
    return (
        f'<svg class="waterfall" height="{height}" role="list" aria-label="{label}">'
        f'<g aria-hidden="true">{stripes}<svg {place} overflow="visible">{ticks}</svg></g>'
        f"{rows}</svg>"
    )


def _tick(number: int, total_ms: float, height: int) -> str:
    """Return the SVG of one vertical line of the time axis with its label. `number`: from 0 to
    TICKS; `total_ms`: the length of the axis; `height`: in pixels."""
    x = f"{100 * number / TICKS:g}%"
    between = " between" if 0 < number < TICKS else ""
    return (
        f'<line class="grid" x1="{x}" x2="{x}" y1="{HEAD - 4}" y2="{height}"/>'
        f'<text class="tick{between}" x="{x}" y="14" text-anchor="{_anchor(number)}">'
        f"{_ms(total_ms * number / TICKS)}</text>"
    )


def _row(number: int, depth: int, span: SpanRecord, total_ms: float, column: str) -> str:
    """Return the SVG of a step: name, bar, duration, and a sentence for screen readers.

    `number`: the step's index, which is its row; `total_ms`: the length of the time axis; `column`:
    the position of the bars, as the SVG attributes `x` and `width`."""
    top = HEAD + ROW * number
    name = printable(span.name)
    took = _ms(span.duration_ms)
    limit = NAME_LIMIT - 2 * depth
    short_name = name if len(name) <= limit else f"{name[: max(limit - 1, 1)]}…"
    failed = bool(span.failed)
    sentence = f"{name}: begins at {_ms(span.offset_ms)}, takes {took}"
    sentence = escape(sentence + (", failed" if failed else ""))
    text = escape(short_name) + (" (failed)" if failed else "")
    text_class = ' class="fail"' if failed else ""
    kind = "fail" if failed else "deep" if depth else "bar"
    begin = min(100 * span.offset_ms / total_ms, 99.7)
    length = max(100 * span.duration_ms / total_ms, 0.3)
    return (
        f'<g role="listitem" aria-label="{sentence}"><title>{sentence}</title>'
        f'<svg width="{NAME_PERCENT - 1}%">'
        f'<text{text_class} x="{12 + 14 * depth}" y="{top + 15}">{text}</text></svg>'
        f'<svg {column}><rect class="{kind}" x="{begin:.3f}%" y="{top + 5}" width="{length:.3f}%"'
        f' height="{ROW - 10}" rx="2"/></svg>'
        f'<text class="number" x="99.5%" y="{top + 15}" text-anchor="end">{took}</text></g>'
    )


def _most(call: TimelineCall) -> str:
    """Return the steps that took most of the call's time, such as `93 % of it: network › bridge`;
    an empty text if there are none.

    The first step took at least half of the call's time. Each further step is a child of the
    previous step and took at least half of that step's time. The percentage is the share of the
    last step in the call's time."""
    path: list[str] = []
    parent: int | None = None
    of_ms = took_ms = call.took_ms
    while True:
        longest = max(
            (span for span in call.spans if span.parent == parent),
            key=lambda span: span.duration_ms,
            default=None,
        )
        if longest is None or longest.duration_ms < MOST * of_ms:
            break
        path.append(longest.name)
        parent, of_ms = longest.id, longest.duration_ms
    if not path or not took_ms:
        return ""
    return f"{100 * of_ms / took_ms:.0f} % of it: {' › '.join(path)}"


def _failed(call: TimelineCall) -> bool:
    return (call.outcome or "OK") != "OK"


def _anchor(tick: int) -> str:
    return "start" if tick == 0 else "end" if tick == TICKS else "middle"


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _ms(value: float) -> str:
    """Format a duration in milliseconds: `0.02 ms`, `12.3 ms`, `1 250 ms`."""
    return (
        f"{value:.2f} ms"
        if value < 10
        else f"{value:.1f} ms"
        if value < 100
        else f"{value:,.0f} ms".replace(",", " ")
    )


def _span_of(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"
