"""Tests the table of attacks: it is complete, names tests that exist, and has valid columns."""

from __future__ import annotations

import ast
from functools import cache
from itertools import groupby
from pathlib import Path

from tests.security.table import ATTACKERS, OUTCOMES, attacks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_ATTACKS = ("test_matrix.py", "test_detectors.py")


@cache
def named_tests(path: Path) -> dict[str, str]:
    """Return a dict: name -> docstring, of all tests of a file; empty if the file does not
    exist."""
    if not path.exists():
        return {}
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def attack_files() -> list[Path]:
    return [path for path in sorted(HERE.glob("test_*.py")) if path.name not in NO_ATTACKS]


def test_each_line_names_a_test_that_exists() -> None:
    """The last column of each line names an existing test. Only for an attack that succeeds
    (`open`) it has a sentence instead."""
    missing = []
    for attack in attacks():
        file, _, test = attack.test.partition("::")
        named = " " in attack.test if attack.outcome == "open" else test in named_tests(ROOT / file)
        if not named:
            missing.append(f"{attack.summary}: {attack.test}")
    assert missing == []


def test_each_test_of_the_folder_has_a_line() -> None:
    listed = {attack.test for attack in attacks()}
    tests = {
        f"tests/security/{path.name}::{test}"
        for path in attack_files()
        for test in named_tests(path)
    }
    assert len(tests) > 100
    assert sorted(tests - listed) == []


def test_columns_have_only_defined_values() -> None:
    wrong = [
        attack
        for attack in attacks()
        if attack.attacker not in ATTACKERS
        or attack.outcome not in OUTCOMES
        or not attack.summary
        or not attack.defence
    ]
    assert wrong == []


def test_the_threat_model_names_each_attacker() -> None:
    """docs/security.md has a row for each attacker, and says whether the table has attacks that
    succeed."""
    page = (ROOT / "docs/security.md").read_text()
    assert [attacker for attacker in ATTACKERS if f"| `{attacker}`: " not in page] == []
    assert ("with the outcome `open`" in page) == any(a.outcome == "open" for a in attacks())


def test_no_line_is_repeated() -> None:
    lines = [(attack.summary, attack.test) for attack in attacks()]
    assert [line for line in lines if lines.count(line) > 1] == []


def test_lines_are_grouped_by_attacker() -> None:
    groups = [attacker for attacker, _ in groupby(attacks(), key=lambda attack: attack.attacker)]
    assert groups == [attacker for attacker in ATTACKERS if attacker in groups]


def test_every_attack_has_a_docstring() -> None:
    """The docstring of each test in this folder has more than 60 characters."""
    # It tells the class, the attack and the evidence.
    short = [
        f"{path.name}::{test}"
        for path in attack_files()
        for test, text in named_tests(path).items()
        if len(text) <= 60
    ]
    assert short == []
