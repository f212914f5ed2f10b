"""Runs Kubernetes' specs in parallel by ginkgo: starts it, waits for its end and reads its
report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
PASSED = "passed"
NOT_FAILED = (PASSED, "skipped", "pending")


def run(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """Run ginkgo in the folder of the file `log`, and write its output to `log`. Return the exit
    code; None after the timeout."""
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env=environment,
            start_new_session=True,
        )
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                # all processes that ginkgo has started
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def specs(report: Path) -> list[Spec]:
    """Return the specs of a JSON report, and failures outside of specs; empty when the run ended
    before the report was written."""
    if not report.exists():
        return []
    return [
        spec
        for suite in json.loads(report.read_text())
        for spec in suite["SpecReports"] or ()
        if spec["LeafNodeType"] == "It" or spec["State"] not in NOT_FAILED
    ]


def name(spec: Mapping[str, Any]) -> str:
    """Return a spec's whole name, as focus and skip expressions see it."""
    return " ".join(
        [*(spec["ContainerHierarchyTexts"] or []), spec["LeafNodeText"] or spec["LeafNodeType"]]
    )


def selected(reported: Sequence[Spec]) -> list[Spec]:
    """Return the specs that focus and skip expressions selected."""
    # A spec that skips itself has a message.
    return [s for s in reported if s["State"] != "skipped" or s.get("Failure", {}).get("Message")]


def assert_passed(reported: Sequence[Spec], fewest: int, log: Path) -> None:
    """Fail with the message of each spec that failed, or with the end of the log when fewer than
    `fewest` passed."""
    bad = [_failure(spec) for spec in reported if spec["State"] not in NOT_FAILED]
    assert not bad, f"{len(bad)} specs failed:\n\n" + "\n\n".join(bad)
    passed = sum(spec["State"] == PASSED for spec in reported)
    assert passed >= fewest, f"{passed} specs passed:\n{log.read_text(errors='replace')[-4000:]}"


def _failure(spec: Spec) -> str:
    failure = spec.get("Failure", {})
    place = failure.get("Location", {})
    message = failure.get("Message", "")[:3000]
    return (
        f"{spec['State']}:"
        f" {name(spec)}\n{message}\n{place.get('FileName')}:{place.get('LineNumber')}"
    )
