"""Checks that each requirement of tests/cri/requirements.tsv has a test that names its number,
or a reason for having none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.test_imports import ROOT
from tests.cri.requirements import requirements


def marks(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (test, number of the requirement) for each `pytest.mark.requirement` of a file."""
    text = path.read_text()
    if "mark.requirement" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for each in node.decorator_list:
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.requirement":
                test = f"{path.relative_to(ROOT / 'tests')}::{node.name}"
                yield from ((test, ast.literal_eval(argument)) for argument in each.args)


def all_marks() -> dict[str, list[str]]:
    """Return a dict: number of a requirement -> tests that are marked with it."""
    by_number: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for test, number in marks(path):
            by_number.setdefault(number, []).append(test)
    return by_number


def test_each_requirement_has_a_test_or_a_reason() -> None:
    marked = all_marks()
    assert not [n for n, each in requirements().items() if not each.reason and n not in marked]


def test_each_mark_names_an_existing_requirement() -> None:
    numbers = requirements()
    assert not {number: tests for number, tests in all_marks().items() if number not in numbers}


def test_no_reason_is_left_where_a_test_exists() -> None:
    marked = all_marks()
    assert not {n: marked[n] for n, each in requirements().items() if each.reason and n in marked}


def test_requirements_mark_only_tests() -> None:
    names = [test for tests in all_marks().values() for test in tests]
    assert names and not [n for n in names if not n.partition("::")[2].startswith("test_")]
    assert not [n for n in names if not n.partition("::")[0].rpartition("/")[2].startswith("test_")]


def test_each_summary_is_a_single_line() -> None:
    for each in requirements().values():
        assert each.summary and len(each.summary) < 120, each
