"""The table in this folder's docstring names tests that exist, and each file of attacks is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import tests.security

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_table_is_true() -> None:
    named = re.findall(r"\| ((?:[\w/]+/)?test_\w+\.py)::(test_\w+) \|", tests.security.__doc__ or "")
    assert len(named) > 60
    missing = [
        f"{file}::{test}"
        for file, test in named
        if test not in functions((ROOT if "/" in file else HERE) / file)
    ]
    assert missing == []
    assert {p.name for p in HERE.glob("test_*.py")} - {file for file, _ in named} <= {
        "test_detectors.py",
        "test_matrix.py",
    }


def test_every_attack_says_what_it_is() -> None:
    """Each test's docstring tells the class, the attack and the proof."""
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name.startswith("test_")
                and path.name not in ("test_matrix.py", "test_detectors.py")
            ):
                assert len(ast.get_docstring(node) or "") > 60, f"{path.name}::{node.name}"
