"""Formats results of a benchmark: medians of the servers side by side, as JSON and as a table in
Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A row of figures: its name, the value of each server (ours last), and the unit. A rate is
    better when it is higher."""

    step: str
    values: Sequence[float]
    unit: str = ""

    def ratios(self) -> list[float]:
        """Return our value divided by each peer's."""
        *peers, ours = self.values
        return [ours / value if value else float("nan") for value in peers]


@dataclass(frozen=True)
class Result:
    """The result of a run. `where`: time, machine and servers; `what`: what was measured; `groups`:
    title of a table -> its rows."""

    names: Sequence[str]
    versions: Sequence[str]
    where: str
    what: str
    groups: Mapping[str, Sequence[Row]]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return the result that `write` has written to `path`."""
        fields = json.loads(path.read_text())
        groups = {
            title: [Row(**row) for row in rows] for title, rows in fields.pop("groups").items()
        }
        return cls(**fields, groups=groups)


def medians(
    samples: Sequence[Mapping[str, Sequence[float]]], steps: Iterable[str], unit: str
) -> list[Row]:
    """Return a row for each of `steps` of which every server has samples."""
    return [
        Row(step, [statistics.median(of_server[step]) for of_server in samples], unit)
        for step in steps
        if all(of_server.get(step) for of_server in samples)
    ]


def header(names: Sequence[str], title: str = "p50") -> list[str]:
    """Return the first lines of a table: title, servers, and our ratio to each other server."""
    *peers, _ = names
    ratios = [f"÷ {peer}" for peer in peers] if len(peers) > 1 else ["ratio"]
    cells = [title, *names, *ratios]
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def _cells(row: Row) -> list[str]:
    values = [formatted(value, row.unit) for value in row.values]
    return [row.step, *values, *(f"{ratio:.3f}" for ratio in row.ratios())]


def lines(rows: Iterable[Row]) -> list[str]:
    """Return a line of a table for each row."""
    return [f"| {' | '.join(_cells(row))} |" for row in rows]


def formatted(value: float, unit: str) -> str:
    """Format a value with three digits or more, and its unit."""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2
    return f"{value:,.{digits}f}{' ' if unit else ''}{unit}"


def table(names: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table with its header."""
    return [*header(names), *lines(rows)]


def where(versions: Iterable[str]) -> str:
    """Return a line with the date, the machine and the servers of a benchmark."""
    kernel = platform.release().split("-")[0]
    machine = f"{os.cpu_count()} cores, Linux {kernel}, Python {platform.python_version()}"
    return f"{time.strftime('%Y-%m-%d')}, {machine}: {', '.join(versions)}"
