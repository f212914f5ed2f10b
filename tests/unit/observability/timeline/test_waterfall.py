"""Tests the timeline's waterfall as text and as a page, which a real browser lays out."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cri_server.cli.observe.waterfall import TimelineCall, lines
from cri_server.cli.observe.waterfall_page import OPEN_LIMIT, page

SPANS = [
    {"id": 0, "name": "shim", "offset_ms": 0.0, "duration_ms": 10.0},
    {"id": 1, "name": "execute", "offset_ms": 20.0, "duration_ms": 80.0, "failed": True},
    {"id": 3, "name": "second", "offset_ms": 60.0, "duration_ms": 40.0, "parent": 1},
    {
        "id": 2,
        "name": "<img src=x onerror=alert(1)>\x1b[31m",
        "offset_ms": 20.0,
        "duration_ms": 5.0,
        "parent": 3,
    },
    {"id": 4, "name": "lost", "offset_ms": 50.0, "duration_ms": 25.0, "parent": 99},
]


def call(**more: Any) -> TimelineCall:
    first = {
        "call": "StartContainer",
        "started_at_ns": 10**18,
        "duration_ms": 100.0,
        "outcome": "OK",
    }
    return TimelineCall.of_entry({**first, "pod": "default/<b>web</b>", "spans": SPANS, **more})


def test_the_text_escapes_control_characters() -> None:
    head, *parts = lines(call(outcome="INTERNAL", error="no\nway\x07"), 10**18)
    assert (
        "100.00 ms  StartContainer default/<b>web</b> INTERNAL: no" in head and "\x07" not in head
    )
    names = [re.sub(r".*[·█] ", "", part) for part in parts]
    assert names[:3] + names[4:] == ["shim", "execute !", "  second", "lost"]
    assert names[3].startswith("    <img src=x onerror=alert(1)>") and "\x1b" not in names[3]
    bars = ["".join(re.findall("[·█]", part)) for part in parts]
    assert (
        bars[0] == "█" * 4 + "·" * 36
        and bars[1] == "·" * 8 + "█" * 32
        and bars[4] == "·" * 20 + "█" * 10 + "·" * 10
    )
    beyond = lines(call(duration_ms=50.0), 10**18)  # the caller gave up half-way
    assert " 50.00 ms  StartContainer" in beyond[0] and [line[40:] for line in beyond[1:]] == [
        p[40:] for p in parts
    ]
    narrow = lines(call(), 10**18, width=100)
    assert all(len(line) <= 100 for line in narrow[1:]) and "…" in narrow[4]
    assert len(lines(call(spans=[{"name": "old", "offset_ms": 0.0, "duration_ms": 1.0}]), 0)) == 2


def in_browser(
    document: str, script: str, tmp_path: Path, *, width: int = 1200, dark: bool = False
) -> Any:
    """Show `document` in a frame of a real browser; return the result of `script`, a JavaScript
    function that gets the frame's window."""
    outer = (
        "<!DOCTYPE html><meta charset=utf-8><body style='margin:0'><iframe id=f"
        f" style='border:0;width:{width}px;height:900px' "
        f'srcdoc="{html.escape(document)}"></iframe><pre id=output></pre><script>const f ='
        ' document.getElementById("f");'
        f'f.onload = () => {{ document.getElementById("output").textContent = '
        f"JSON.stringify(({script})(f.contentWindow)) }}</script>"
    )
    (tmp_path / "outer.html").write_text(outer)
    command = [
        "chromium-headless-shell",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += [f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, f"file://{tmp_path}/outer.html"], capture_output=True, text=True, timeout=120
    )
    output = re.search(r'<pre id="output">(.*?)</pre>', done.stdout, re.DOTALL)
    assert output, done.stderr[-2000:]
    return json.loads(html.unescape(output[1]))


MEASURE = """(w) => {
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.width] };
  const d = w.document, rows = [...d.querySelectorAll('[role=listitem]')];
  return {
    title: d.title, heading: d.querySelector('h1').textContent,
    said: rows.map(r => r.getAttribute('aria-label')),
    bars: rows.map(r => box(r.querySelector('svg > rect'))),
    frame: box(d.querySelector('.waterfall > g > svg .grid')),
    colours: rows.map(r => w.getComputedStyle(r.querySelector('svg > rect')).fill),
    back: w.getComputedStyle(d.body).backgroundColor, \
ink: w.getComputedStyle(d.querySelector('svg text')).fill,
    open: [...d.querySelectorAll('details')].map(e => e.open),
    overflow: d.documentElement.scrollWidth > d.documentElement.clientWidth,
    foreign: d.querySelectorAll('img, b, script, link, [src], [href], [onerror]').length,
    loaded: w.performance.getEntriesByType('resource').length,
    most: [...d.querySelectorAll('.most, .error')].map(e => e.textContent),
  }
}"""


def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    document = page(
        "default/<b>web</b>", [call(outcome="INTERNAL", error="<i>no</i> way"), call(spans=[])]
    )
    measures = in_browser(document, MEASURE, tmp_path)
    assert measures["title"] == measures["heading"] == "Timeline of default/<b>web</b>"
    assert measures["foreign"] == measures["loaded"] == 0 and not measures["overflow"]
    assert measures["said"][0] == "shim: begins at 0.00 ms, takes 10.0 ms"
    assert measures["said"][1] == "execute: begins at 20.0 ms, takes 80.0 ms, failed"
    assert measures["most"] == ["<i>no</i> way", "40 % of it: execute › second"]
    (left, width), (_, whole) = measures["bars"][0], measures["bars"][1]
    assert whole == pytest.approx(8 * width, rel=0.02)
    for (bar_left, bar_width), (begin, length) in zip(
        measures["bars"], [(0, 10), (20, 80), (60, 40), (20, 5), (50, 25)], strict=True
    ):
        assert bar_left - left == pytest.approx(begin * width / 10, abs=1)
        assert bar_width == pytest.approx(length * width / 10, abs=1)
    assert measures["colours"][1] != measures["colours"][0] != measures["colours"][2]
    assert measures["open"] == [True, False]


def test_the_page_is_readable_in_light_and_dark_and_on_a_phone(tmp_path: Path) -> None:
    document = page("", [call() for _ in range(OPEN_LIMIT + 1)])

    def brightness(colour: str) -> float:
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        low, high = sorted((brightness(a), brightness(b)))
        return (high + 0.05) / (low + 0.05)

    light, dark = (in_browser(document, MEASURE, tmp_path, dark=dark) for dark in (False, True))
    assert brightness(light["back"]) > 0.9 > 0.1 > brightness(dark["back"])
    for measures in (light, dark):
        assert contrast(measures["back"], measures["ink"]) > 4.5, "WCAG 1.4.3"
        assert contrast(measures["back"], measures["colours"][0]) > 3, "WCAG 1.4.11"
        assert not any(measures["open"]), "many calls are folded"
    phone = in_browser(document, MEASURE, tmp_path, width=390)
    assert not phone["overflow"]


def test_calls_share_a_time_axis() -> None:
    calls = [
        call(spans=[], duration_ms=250.0),
        call(spans=[], started_at_ns=10**18 + 999_999_000, duration_ms=0.001),
    ]
    text = page("", calls)
    bars = re.findall(
        r'<svg class="scale"[^>]*><rect class="bar" x="([0-9.]+)%" width="([0-9.]+)%"', text
    )
    # The first call takes a quarter of the axis; the second, at the end, the least visible width.
    assert bars == [("0.00", "25.00"), ("99.50", "0.50")]


def test_times_are_shown_with_their_zone() -> None:
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3}[+-]\d{4} ", lines(call(), 10**18)[0])
