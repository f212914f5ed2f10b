"""Reads requirements.tsv: the demands of kubelet, its tools and the interface's description on a
CRI server. A line has a number, a summary, and the reason where no test can show it.

A test names what it proves by `@pytest.mark.requirement("3.1.4")`;
tests/architecture/test_requirements.py compares the two. Numbers go by subject: 1 transport (1.a
codes, 1.b what clients check in answers), 2 objects, 3 pods, 4 containers, 5 images, 6 files and
mounts, 7 resources, 8 security, 9 streams, 10 figures, events and status, 11 logs and recovery, 12
constants, 13 differences between runtimes, 14 this implementation.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".tsv")


class Requirement(NamedTuple):
    """A requirement. `reason`: why no test shows it; empty where one does."""

    number: str
    summary: str
    reason: str


def requirements() -> dict[str, Requirement]:
    """Return all requirements by number, in their order. Raises ValueError for a number that occurs
    twice."""
    by_id: dict[str, Requirement] = {}
    for line in TABLE.read_text().splitlines():
        each = Requirement(*line.split("\t"))
        if each.number in by_id:
            raise ValueError(f"{TABLE}: {each.number} is there twice")
        by_id[each.number] = each
    return by_id
