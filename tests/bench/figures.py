"""`make figures`: puts the results of `make bench` and `make bench-kubelet` into the README, and
draws docs/bench.svg.

The results are the JSON files of the two commands. The README's table between two marks is
replaced; nothing is measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tests.bench import chart, compare, kubelet
from tests.bench.tables import Result, Row, header, lines

BEGIN, END = "<!-- figures: written by `make figures` -->", "<!-- end of figures -->"
CHART = Path("docs/bench.svg")
DRAWN = {
    compare.ONE: (
        "RunPodSandbox",
        "CreateContainer",
        "StartContainer",
        "ExecSync",
        "pod up",
        "pod down",
        "CPU of the machine per cycle",
    ),
    compare.MEMORY_TITLE: ("private memory per pod", "idle server and helpers, PSS"),
}


def block(results: Sequence[Result]) -> str:
    """Return the README's part: the chart, the machine and time of each result, and one table of
    all results."""
    first = results[0]
    text = [BEGIN, f"![Time and cost of each step, side by side]({CHART})", ""]
    if all(result.where == first.where for result in results):
        text += [f"{first.where}. {'; '.join(result.what for result in results)}."]
    else:
        text += [f"{result.where}. {result.what}." for result in results]
    text += ["", *header(first.names)]
    for result in results:
        for title, rows in result.groups.items():
            text += [f"| **{title}** {'| ' * (2 * len(first.names) - 1)}|", *lines(rows)]
    return "\n".join([*text, END])


def filled(readme: str, results: Sequence[Result]) -> str:
    """Return the README with these results between its marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"the README must have one block between {BEGIN} and {END}")
    return pattern.sub(lambda _: block(results), readme)


def drawing(results: Sequence[Result]) -> str:
    """Return the chart as SVG: costs of one pod and, if there is a result of `make bench-kubelet`,
    of pods through a kubelet."""
    first = results[0]
    rows = [
        row
        for title, rows in first.groups.items()
        for row in rows
        if row.step in DRAWN.get(title, ())
    ]
    for title, group in first.groups.items():
        if title.endswith("at once"):
            rows += [
                Row(f"pod up, {title}", row.values, row.unit)
                for row in group
                if row.step == "pod up"
            ]
    for result in results[1:]:
        for title, group in result.groups.items():
            pods = title.split()[0]
            rows += [
                Row(f"{pods} pods by kubelet, all Ready", row.values, row.unit)
                for row in group
                if row.step == "post to all Ready"
            ]
    subtitle = (
        f"Shorter is better; each figure's longest bar has the whole width. "
        f"{first.where.split(':')[0]}"
    )
    return chart.svg("What a pod costs on each runtime, p50", subtitle, first.names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*", default=[compare.RESULT, kubelet.RESULT])
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--svg", type=Path, default=CHART)
    options = parser.parse_args()
    if missing := [str(path) for path in options.results if not path.exists()]:
        parser.error(
            f"no {' and no '.join(missing)}: `make bench` and `make bench-kubelet` write them"
        )
    results = [Result.read(path) for path in options.results]
    if any(result.names != results[0].names for result in results):
        parser.error(f"the results are of other servers: {[result.names for result in results]}")
    options.readme.write_text(filled(options.readme.read_text(), results))
    options.svg.write_text(drawing(results))


if __name__ == "__main__":
    main()
