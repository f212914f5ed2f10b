"""Draws bars of several servers, side by side for each figure: one self-contained SVG, without
script or font.

The chart has its own background, dark for a reader who prefers dark, so that it can be read on any
page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from tests.bench.tables import Row, formatted

LEFT, WIDTH, RIGHT, TOP, BAR, GAP = 220, 400, 90, 62, 10, 12
STYLE = """
.panel { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328 } .quiet { fill: #57606a }
.s0 { fill: #afb8c1 } .s1 { fill: #6e7781 } .ours { fill: #0969da }
@media (prefers-color-scheme: dark) {
.panel { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .quiet { fill: #9198a1 }
.s0 { fill: #484f58 } .s1 { fill: #8b949e } .ours { fill: #4493f8 }
}"""


def svg(title: str, subtitle: str, names: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a chart of `rows` as SVG. The values of a row are those of the servers `names`, ours
    last; its longest bar has the whole width."""
    step = BAR * len(names) + GAP
    height = TOP + step * len(rows) + 8
    width = LEFT + WIDTH + RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
        f'font-family="sans-serif" font-size="12"><style>{STYLE}\n</style>',
        f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{html.escape(title)}</text>',
        f'<text class="quiet" x="12" y="39" font-size="11">{html.escape(subtitle)}</text>',
        *_legend(names),
    ]
    for number, row in enumerate(rows):
        lines += _bars(row, TOP + step * number)
    return "\n".join([*lines, "</svg>", ""])


def _legend(names: Sequence[str]) -> list[str]:
    lines, x = [], LEFT
    for number, name in enumerate(names):
        lines += [
            f'<rect class="{_style(number, len(names))}" x="{x}" y="46" width="{BAR}" '
            f'height="{BAR}"/>',
            f'<text x="{x + BAR + 4}" y="55" font-size="11">{html.escape(name)}</text>',
        ]
        x += BAR + 22 + 7 * len(name)
    return lines


def _bars(row: Row, y: int) -> list[str]:
    middle = y + BAR * len(row.values) / 2 + 8
    lines = [
        f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{html.escape(row.step)}</text>'
    ]
    longest = max(row.values) or 1
    for number, value in enumerate(row.values):
        length = max(value / longest * WIDTH, 1)
        top = y + 4 + BAR * number
        lines += [
            f'<rect class="{_style(number, len(row.values))}" x="{LEFT}" y="{top}" '
            f'width="{length:.1f}" height="{BAR - 1}"/>',
            f'<text class="quiet" x="{LEFT + length + 5:.1f}" y="{top + 8}" '
            f'font-size="10">{formatted(value, row.unit)}</text>',
        ]
    return lines


def _style(number: int, servers: int) -> str:
    return "ours" if number == servers - 1 else f"s{number}"
