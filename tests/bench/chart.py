"""A bar for each step: how long ours takes where the peer takes 1. One self-contained SVG, without a script or a font of its own."""

from __future__ import annotations

import html
from collections.abc import Sequence

ROW, LEFT, WIDTH, TOP, RIGHT = 24, 210, 460, 56, 90
BAR, PEER, TEXT, GRID = "#2f6f9f", "#c9d3da", "#22303a", "#9aa7b0"


def svg(title: str, subtitle: str, rows: Sequence[tuple[str, float]]) -> str:
    """`rows`: (step, our time divided by the peer's). A bar that is longer than the peer's is cut at twice its length."""
    height = TOP + ROW * len(rows) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{TEXT}">',
        f'<text x="8" y="20" font-size="15" font-weight="bold">{html.escape(title)}</text>',
        f'<text x="8" y="38" fill="{GRID}" font-size="11">{html.escape(subtitle)}</text>',
    ]
    for number, (name, ratio) in enumerate(rows):
        y = TOP + ROW * number
        length = min(ratio, 2.0) * WIDTH / 2
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{WIDTH / 2}" height="{ROW - 8}" fill="{PEER}"/>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{length:.1f}" height="{ROW - 8}" fill="{BAR}"/>',
            f'<text x="{LEFT + max(length, WIDTH / 2) + 6:.1f}" y="{y + 15}">{ratio:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
