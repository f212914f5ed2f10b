"""Tests the summary of a run of the conformance suite: each spec has a category, and every selected
spec is counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.kube_conformance import limits, report
from tests.support import ginkgo

NAMES = [
    "a passes",
    "b fails",
    "c is interrupted",
    "d has a limit",
    "e skips itself",
    "f never began",
    "g is unknown",
]


def spec(name: str, state: str, said: str = "", kind: str = "It") -> dict[str, Any]:
    containers, _, leaf = name.rpartition(" ")
    failure = {"Failure": {"Message": said}} if said else {}
    return {
        "ContainerHierarchyTexts": [containers] if containers else None,
        "LeafNodeText": leaf,
        "LeafNodeType": kind,
        "State": state,
        **failure,
    }


def test_every_selected_spec_is_counted_once(tmp_path: Path) -> None:
    written = [
        spec("a passes", "passed"),
        spec("b fails", "failed", "expected 1\n to equal   2"),
        spec("c is interrupted", "interrupted"),
        spec("d has a limit", "skipped"),
        spec("e skips itself", "skipped", "needs ten nodes"),
        spec("f never began", "skipped"),
        spec("h was not selected", "failed"),
        spec("", "failed", kind="BeforeSuite"),
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps([{"SpecReports": written}]))
    result = report.sum_up(
        NAMES, ginkgo.specs(path), lambda name: "one machine" if name[0] == "d" else ""
    )
    assert result.passed == ["a passes"]
    assert result.failed == {
        "b fails": "failed: expected 1 to equal 2",
        "c is interrupted": "interrupted",
    }
    assert result.limited == {"d has a limit": "one machine", "e skips itself": "needs ten nodes"}
    assert result.not_run == ["f never began", "g is unknown"]
    assert result.total == len(NAMES)
    assert (
        result.text().splitlines()[-1]
        == "7 specs: 1 passed, 2 failed, 2 cannot run here, 2 not run"
    )


def test_a_run_without_a_report_ran_nothing(tmp_path: Path) -> None:
    result = report.sum_up(NAMES, ginkgo.specs(tmp_path / "none.json"), lambda name: "")
    assert result.not_run == NAMES


def test_a_limit_is_skipped_with_its_reason() -> None:
    table = limits.WITHOUT_CONTROLLERS
    expression = limits.skip_expression(table)
    for part, why in table.items():
        name = f"[sig-node] {part} does it [Conformance]"
        assert why and limits.reason(name, table) == why and re.search(expression, name)
    other = "[sig-node] Pods should be updated [Conformance]"
    assert limits.reason(other, table) == "" and not re.search(expression, other)
    assert limits.skip_expression({}) == ""
