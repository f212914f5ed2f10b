"""Remembered calls as one page for a browser: HTML, styles and SVG in one file that loads nothing
and runs nothing.

Each call is a `details` element with its waterfall in it. Names in it are a cluster's users': all
text is escaped, and the page forbids itself scripts. What the bars show is said in words, too, for
who hears the page.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pyrunc
from cri_server.cli.observe.waterfall import Call, clock, outcome, subject, tree
from cri_server.cli.output.show import printable
from cri_server.observability.timeline.entry import SpanRecord

ROW, HEAD = 22, 24  # pixels
NAME_PERCENT, TOOK_PERCENT = 36, 9  # of the width: names, and durations at the right
NAME_LIMIT = 50  # characters of a name, two fewer at each depth; the rest is in its tooltip
TICKS = 4
LEAST_PERCENT = 0.5  # of the axis: a shorter call would not be seen
OPEN_LIMIT = 12  # so many calls are unfolded
MOST = 0.5  # a part that takes so much of the whole is where the time went

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2430; --quiet: #5b6675; --line: #dfe4ea; --stripe: #f6f8fa;
  --bar: #2f6fd6; --deep: #8bb2ee; --fail: #c62f3b; --mark: #b35900 }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --text: #e4e9f0; --quiet: #9aa6b5; --line: #2b333e;
  --stripe: #181e26; --bar: #5a96f2; --deep: #4d76b8; --fail: #f2707a; --mark: #f0a55a } }
body { margin: 0 auto; max-width: 1200px; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: 0 } h1 + p { color: var(--quiet); margin: .2rem 0 1.2rem }
.number, .when, svg text { font-variant-numeric: tabular-nums }
details { border-top: 1px solid var(--line) } details:last-of-type { border-bottom: 1px solid var(--line) }
summary { display: grid; grid-template-columns: 1rem 9rem 13rem minmax(0, 1fr) 7rem 6rem; gap: .7rem; padding: .45rem .2rem;
  cursor: pointer; align-items: center; list-style: none } summary::-webkit-details-marker { display: none }
summary:hover { background: var(--stripe) } summary:focus-visible { outline: 2px solid var(--bar) }
summary::before { content: "\\25b8"; color: var(--quiet) } details[open] > summary::before { content: "\\25be" }
.bare summary::before { content: "" } .bare summary { cursor: default }
.when, .about, .outcome { color: var(--quiet) } .about { overflow-wrap: anywhere } .call { font-weight: 600 }
.number { text-align: right } .scale { height: 8px; width: 100%; display: block }
.failed .outcome, .error { color: var(--fail) } .error, .most { margin: 0 0 .5rem 1.9rem; overflow-wrap: anywhere }
.most { color: var(--mark) } .waterfall { display: block; width: 100%; margin: 0 0 .9rem }
svg text { fill: var(--text); font: 12px/1 system-ui, sans-serif } svg .tick, svg .number { fill: var(--quiet) }
svg .grid { stroke: var(--line) } svg .stripe { fill: var(--stripe) } svg .bar { fill: var(--bar) }
svg .deep { fill: var(--deep) } svg .fail { fill: var(--fail) } svg text.fail { fill: var(--fail) }
footer { color: var(--quiet); margin-top: 1rem; font-size: 12px }
@media (max-width: 700px) { summary { grid-template-columns: 1rem 1fr 6rem } .when, .scale, .outcome { display: none }
  .about { grid-column: 2 / -1; grid-row: 2 } svg .between { display: none } }
@media print { body { max-width: none } }
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that all calls lie in, in nanoseconds."""

    begin_ns: int
    length_ns: int

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Axis:
        begin = min(call.started_at_ns for call in calls)
        return cls(
            begin,
            max(max(call.started_at_ns + int(call.took_ms * 1e6) for call in calls) - begin, 1),
        )

    def percent(self, call: Call) -> tuple[float, float]:
        """Where the call begins and how long it is, in percent of the axis; wide enough to be seen."""
        width = max(100 * call.took_ms * 1e6 / self.length_ns, LEAST_PERCENT)
        return min(100 * (call.started_at_ns - self.begin_ns) / self.length_ns, 100 - width), width


def page(pod: str, calls: Sequence[Call]) -> str:
    """The document. `calls` is not empty, and in the order in which they are shown."""
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
<p>{_summary(calls)}</p>
{body}
</main>
<footer>pyrunc-cri {escape(pyrunc.__version__)}. The bars beside the calls share one time axis, {_span_of(axis.length_ns / 1e9)} long; within a call its parts have the call's own scale.</footer>
</body>
</html>
"""


def _summary(calls: Sequence[Call]) -> str:
    begins = min(call.started_at_ns for call in calls)
    ends = max(call.started_at_ns + int(call.took_ms * 1e6) for call in calls)
    day = datetime.datetime.fromtimestamp(begins / 1e9).astimezone()
    slowest = max(calls, key=lambda call: call.took_ms)
    failed = sum(_failed(call) for call in calls)
    words = [
        f"{len(calls)} call{'s' if len(calls) != 1 else ''} from {day:%Y-%m-%d %H:%M:%S %Z} on, in {_span_of((ends - begins) / 1e9)}",
        f"the slowest is {_text(slowest.call)} with {_ms(slowest.took_ms)}",
        *([f"{failed} failed"] if failed else []),
    ]
    return escape("; ".join(words), quote=False) + "."


def _call(call: Call, axis: Axis, *, unfolded: bool) -> str:
    """A call with its parts; one without parts cannot be unfolded."""
    took_ms, spans = call.took_ms, list(tree(call.spans))
    at, width = axis.percent(call)
    classes = " ".join(
        name for name, holds in (("failed", _failed(call)), ("bare", not spans)) if holds
    )
    scale = (
        f'<svg class="scale" aria-hidden="true"><rect class="{"fail" if _failed(call) else "bar"}" '
        f'x="{at:.2f}%" width="{width:.2f}%" height="8" rx="2"/></svg>'
    )
    summary = (
        f'<summary><span class="when">{clock(call)}</span> <span class="call">{_text(call.call)}</span> '
        f'<span class="about">{_text(subject(call))} <span class="outcome">{_text(outcome(call))}</span></span> '
        f'{scale} <span class="number">{_ms(took_ms) if call.duration_ms is not None else ""}</span></summary>'
    )
    error = f'<p class="error">{_text(call.error)}</p>' if call.error else ""
    most = _most(call)
    mostly = f'<p class="most">{_text(most)}</p>' if most else ""
    shown = " open" if spans and (unfolded or _failed(call)) else ""
    inside = f"{error}{mostly}{_waterfall(call, spans) if spans else ''}"
    return f'<details class="{classes}"{shown}>{summary}{inside}</details>'


def _waterfall(call: Call, spans: Sequence[tuple[int, SpanRecord]]) -> str:
    total_ms = max(call.took_ms, max(span.offset_ms + span.duration_ms for _, span in spans), 0.001)
    height = HEAD + ROW * len(spans) + 4
    place = f'x="{NAME_PERCENT}%" width="{100 - NAME_PERCENT - TOOK_PERCENT}%"'
    ticks = "".join(
        f'<line class="grid" x1="{100 * k / TICKS:g}%" x2="{100 * k / TICKS:g}%" y1="{HEAD - 4}" y2="{height}"/>'
        f'<text class="tick{" between" if 0 < k < TICKS else ""}" x="{100 * k / TICKS:g}%" y="14" text-anchor="{_anchor(k)}">{_ms(total_ms * k / TICKS)}</text>'
        for k in range(TICKS + 1)
    )
    stripes = "".join(
        f'<rect class="stripe" y="{HEAD + ROW * number}" width="100%" height="{ROW}"/>'
        for number in range(1, len(spans), 2)
    )
    rows = "".join(
        _row(number, depth, span, total_ms, place) for number, (depth, span) in enumerate(spans)
    )
    return (
        f'<svg class="waterfall" height="{height}" role="list" aria-label="Parts of {_text(call.call)}, {_ms(call.took_ms)}">'
        f'<g aria-hidden="true">{stripes}<svg {place} overflow="visible">{ticks}</svg></g>{rows}</svg>'
    )


def _row(number: int, depth: int, span: SpanRecord, total_ms: float, place: str) -> str:
    """A part's name, its bar and its duration; for who hears it, a sentence."""
    top, failed = HEAD + ROW * number, bool(span.failed)
    name, took = printable(span.name), _ms(span.duration_ms)
    limit = NAME_LIMIT - 2 * depth
    shown = name if len(name) <= limit else f"{name[: max(limit - 1, 1)]}…"
    begin, length = (100 * part_ms / total_ms for part_ms in (span.offset_ms, span.duration_ms))
    said = f"{name}: begins at {_ms(span.offset_ms)}, takes {took}{', failed' if failed else ''}"
    kind = "fail" if failed else "deep" if depth else "bar"
    return (
        f'<g role="listitem" aria-label="{escape(said)}"><title>{escape(said)}</title>'
        f'<svg width="{NAME_PERCENT - 1}%"><text{" class=" + chr(34) + "fail" + chr(34) if failed else ""} x="{12 + 14 * depth}" '
        f'y="{top + 15}">{escape(shown)}{" (failed)" if failed else ""}</text></svg>'
        f'<svg {place}><rect class="{kind}" x="{min(begin, 99.7):.3f}%" y="{top + 5}" width="{max(length, 0.3):.3f}%" height="{ROW - 10}" '
        f'rx="2"/></svg><text class="number" x="99.5%" y="{top + 15}" text-anchor="end">{took}</text></g>'
    )


def _most(call: Call) -> str:
    """Down to which part most of the call's time went, in words; empty when no part stands out."""
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


def _failed(call: Call) -> bool:
    return (call.outcome or "OK") != "OK"


def _anchor(tick: int) -> str:
    return "start" if tick == 0 else "end" if tick == TICKS else "middle"


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _ms(value: float) -> str:
    """`0.02 ms`, `12.3 ms`, `1 250 ms`."""
    value = float(value)
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
