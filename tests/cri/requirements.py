"""Reads requirements.tsv: what kubelet, its tools and the description of CRI demand of a CRI
server. A line has a number, a summary and, if no test can show the requirement, the reason.

A test names what it proves by `@pytest.mark.requirement("3.1.4")`;
tests/architecture/test_requirements.py compares these marks with the table. Numbers go by subject:
1 transport (1.a codes, 1.b what clients check in answers), 2 objects, 3 pods, 4 containers, 5
images, 6 files and mounts, 7 resources, 8 security, 9 streams, 10 figures, events and status, 11
logs and recovery, 12 constants, 13 differences between runtimes, 14 this implementation.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".tsv")


class Requirement(NamedTuple):
    """A requirement. `reason` tells why no test shows it, and is empty if a test does."""

    number: str
    summary: str
    reason: str


def requirements() -> dict[str, Requirement]:
    """Return a dict: number -> requirement, in the order of the table. Raises ValueError for a
    number that occurs twice."""
    by_id: dict[str, Requirement] = {}
    for line in TABLE.read_text().splitlines():
        each = Requirement(*line.split("\t"))
        if each.number in by_id:
            raise ValueError(f"{TABLE}: {each.number} is there twice")
        by_id[each.number] = each
    return by_id
