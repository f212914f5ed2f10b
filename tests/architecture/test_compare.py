"""Checks docs/compare.md: every test that a row names exists and is collected by pytest."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "compare.md"
NONE = ("none", "out of scope")


def rows() -> list[list[str]]:
    """Return the cells of every row of the page's tables, without the headings."""
    lines = [
        line.strip("|\n").split("|")
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    cells = [[cell.strip() for cell in row] for row in lines]
    return [row for row in cells if not row[-1].startswith(("---", "ours, shown by"))]


def collected(file: Path) -> set[str]:
    """Return the names of a file's tests: functions, and methods of classes."""
    scopes = [ast.parse(file.read_text())]
    scopes += [node for node in scopes[0].body if isinstance(node, ast.ClassDef)]  # type: ignore[misc]
    return {
        node.name
        for scope in scopes
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_every_row_names_a_test_or_says_that_it_has_none() -> None:
    assert len(rows()) > 60
    assert [row for row in rows() if "`" not in row[-1] and not row[-1].startswith(NONE)] == []


def test_every_named_test_exists() -> None:
    named = [re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[-1]) for row in rows()]
    missing = [
        (file, name)
        for row in named
        for file, name in row
        if not (TESTS / file).is_file() or (name and name not in collected(TESTS / file))
    ]
    assert sum(map(len, named)) > 55 and missing == []
