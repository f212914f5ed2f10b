"""Tests what `make figures` writes from results: the README's block and its chart."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from tests.bench import compare, figures
from tests.bench.tables import Result, Row, medians

NAMES = ["containerd + runc", "CRI-O + crun", "pyrunc"]


def bench() -> Result:
    groups = {
        compare.ONE: [
            Row("pod up", [200.0, 100.0, 25.0], "ms"),
            Row("pods up per second", [5.0, 10.0, 40.0]),
        ],
        "8 at once": [Row("pod up", [700.0, 400.0, 100.0], "ms")],
        compare.MEMORY_TITLE: [Row("private memory per pod", [5200.0, 260.0, 104.0], "KiB")],
    }
    return Result(NAMES, ["c 1", "d 2", "e 3"], "today, 2 cores: c 1, d 2, e 3", "20 pods", groups)


def kubelet() -> Result:
    title = "40 pods at once through kubelet 1.36.3"
    rows = [Row("post to all Ready", [6.5, 4.0, 2.5], "s")]
    return Result(NAMES, [], "today, 2 cores: c 1, d 2, e 3", "40 pods", {title: rows})


def test_a_written_result_is_read_unchanged(tmp_path: Path) -> None:
    bench().write(tmp_path / "some/bench.json")
    assert Result.read(tmp_path / "some/bench.json") == bench()


def test_the_block_of_the_readme_is_replaced_and_nothing_else() -> None:
    readme = f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n"
    filled = figures.filled(readme, [bench(), kubelet()])
    assert filled.startswith(f"before\n{figures.BEGIN}\n") and filled.endswith(
        f"{figures.END}\nafter\n"
    )
    assert "| pod up | 200.0 ms | 100.0 ms | 25.00 ms | 0.125 | 0.250 |" in filled
    assert "| pods up per second | 5.00 | 10.00 | 40.00 | 8.000 | 4.000 |" in filled
    assert "| post to all Ready | 6.50 s | 4.00 s | 2.50 s | 0.385 | 0.625 |" in filled
    assert figures.filled(filled, [bench(), kubelet()]) == filled
    widths = {line.count("|") for line in filled.splitlines() if line.startswith("|")}
    assert len(widths) == 1


@pytest.mark.parametrize("readme", ["", f"{figures.BEGIN} {figures.END}" * 2])
def test_a_readme_must_have_one_block_for_the_figures(readme: str) -> None:
    with pytest.raises(ValueError, match="one block"):
        figures.filled(readme, [bench()])


def test_the_readme_has_that_place() -> None:
    figures.filled(Path(__file__, "../../../../README.md").resolve().read_text(), [bench()])


def test_the_chart_has_a_bar_of_each_server_for_each_figure() -> None:
    root = xml.fromstring(figures.drawing([bench(), kubelet()]))
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    steps = [
        "pod up",
        "private memory per pod",
        "pod up, 8 at once",
        "40 pods by kubelet, all Ready",
    ]
    assert [text for text in texts if text in steps] == steps
    bars = [
        float(node.attrib["width"])
        for node in root.iter("{http://www.w3.org/2000/svg}rect")
        if node.attrib["class"] == "ours"
        and node.attrib["x"] == "220"
        and node.attrib["height"] == "9"
    ]
    assert bars == [50.0, 8.0, 57.1, 153.8]  # of 400, what the longest has


def test_a_step_without_samples_of_a_server_is_left_out() -> None:
    samples = [{"a": [3.0, 1.0, 2.0], "b": [1.0]}, {"a": [4.0]}]
    assert medians(samples, ["a", "b"], "ms") == [Row("a", [2.0, 4.0], "ms")]
