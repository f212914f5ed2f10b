"""Checks that the list of tests that prove less without a capability is complete, and that the
guest virtual machine runs them all."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.capabilities import WEAKENED
from tests.vm.test_guest import INSIDE

ROOT = Path(__file__).parents[2]


def imports_holds(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "tests.support.capabilities"
        and "holds" in names
        for node in ast.walk(tree)
        for names in ([alias.name for alias in getattr(node, "names", ())],)
    )


def test_each_weakened_test_is_listed() -> None:
    weakened = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "holds(" in path.read_text() and imports_holds(ast.parse(path.read_text()))
    }
    assert weakened == set(WEAKENED)


def test_no_test_reads_capabilities_in_another_way() -> None:
    # A test that reads capabilities itself would be missing from the list.
    word = "CAP_SYS_" + "RESOURCE"
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    shifted = [
        f"{path.name}:{number}"
        for path in tests
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word in line and ">>" in line
    ]
    assert shifted == []


def test_the_guest_runs_each_weakened_test() -> None:
    run = " ".join(INSIDE).split()
    for file, names in WEAKENED.items():
        assert file in run or all(f"{file}::{name}" in run for name in names), file
        tree = ast.parse((ROOT / file).read_text())
        defined = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert names and set(names) <= defined, file
