"""Tests how test files are grouped into units, which two workers run in parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import schedule

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "path, unit",
    [
        ("tests/vm/test_guest.py::test_tests_of_the_guest_pass[plan]", schedule.GUEST),
        ("tests/vm/test_kubelet.py", schedule.GUEST),
        ("tests/kernel/shim/test_shim.py::test_orphans", schedule.MACHINE),
        ("tests/cri/critest/test_critest.py::test", schedule.MACHINE),
        ("tests/kube/test_demos.py", schedule.MACHINE),
        ("tests/cri/test_recovery.py::test_x[a::b]", "tests/cri/test_recovery.py"),
        ("tests/unit/test_record.py::TestIt::test", "tests/unit/test_record.py"),
    ],
)
def test_each_test_file_belongs_to_a_unit(path: str, unit: str) -> None:
    assert schedule.unit_of(path) == unit


def test_the_long_units_come_first_and_the_rest_stays_in_order() -> None:
    paths = [
        "tests/cri/test_b.py",
        "tests/kernel/b.py",
        "tests/unit/a.py",
        "tests/vm/a.py",
        "tests/kernel/a.py",
    ]
    numbers = schedule.in_order(range(5), paths)
    assert numbers == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("start", [*schedule.IN_THE_GUEST, *schedule.ANYWHERE])
def test_every_path_prefix_matches_a_test(start: str) -> None:
    assert list(TESTS.glob(f"{start}*"))


def test_workers_are_numbered() -> None:
    class Config:
        workerinput = {"workerid": "gw1"}  # noqa: RUF012

    assert (schedule.worker(Config()), schedule.worker(object())) == (2, 0)
