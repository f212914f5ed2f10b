"""Runs Kubernetes' conformance suite with ginkgo on a cluster, and writes its report into a
folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube_conformance import limits, report
from tests.kube_conformance.report import Result
from tests.support import ginkgo, toolchain
from tests.support.cluster import Cluster

LABEL = "Conformance"
LOG, JUNIT = "e2e.log", "junit_01.xml"
_REPORT = "ginkgo/report.json"


def selected(focus: str, folder: Path) -> list[str]:
    """Return the names of the conformance specs that match the regular expression `focus`; all of
    them if it is empty."""
    out = folder / "selected.json"
    program = str(toolchain.e2e() / "e2e.test")
    subprocess.run(
        [
            program,
            "--ginkgo.dry-run",
            f"--ginkgo.label-filter={LABEL}",
            f"--ginkgo.focus={focus}",
            f"--ginkgo.json-report={out}",
            "--provider=local",
            "--kubeconfig=/dev/null",
        ],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    names = [ginkgo.name(spec) for spec in ginkgo.specs(out) if spec["State"] == ginkgo.PASSED]
    out.unlink()
    return names


@dataclass(frozen=True)
class Target:
    """A cluster under test. `limits`: part of a spec's name -> reason why the nodes cannot run the
    spec; `options`: further options of e2e.test."""

    kubeconfig: Path
    limits: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()


def on_this_machine(cluster: Cluster) -> Target:
    """Return the target for a cluster whose nodes are namespaces of this machine."""
    node = cluster.node
    options = (
        f"--container-runtime-endpoint=unix://{node.socket}",
        f"--kubelet-root-dir={node.folder}/kubelet",
    )
    return Target(cluster.kubeconfig, limits.of_this_machine(), options)


def run(target: Target, results: Path, focus: str, processes: int, timeout_s: int) -> Result:
    """Run the specs that `focus` matches, `processes` at a time; serial ones come last, alone.

    `results` gets `e2e.log` and `junit_01.xml`. Specs that have not ended within `timeout_s`
    seconds are interrupted.
    """
    results.mkdir(parents=True, exist_ok=True)
    names = selected(focus, results)
    there = target.limits
    programs, skip = toolchain.e2e(), limits.skip_expression(there)
    command = [
        str(programs / "ginkgo"),
        f"--procs={processes}",
        f"--timeout={timeout_s}s",
        f"--label-filter={LABEL}",
        f"--focus={focus}",
        *([f"--skip={skip}"] if skip else []),
        "--no-color",
        "-v",
        str(programs / "e2e.test"),
        "--",
        f"--kubeconfig={target.kubeconfig}",
        "--provider=local",
        f"--kubectl-path={toolchain.kubernetes()}/kubectl",
        *target.options,
        "--disable-log-dump",
        f"--report-dir={results}",
        "--report-complete-ginkgo",
        f"--e2e-output-dir={results}",
    ]
    # a spec without a report at the end was not run
    ginkgo.run(command, results / LOG, timeout_s + 300)
    result = report.sum_up(
        names, ginkgo.specs(results / _REPORT), lambda name: limits.reason(name, there)
    )
    (results / "summary.txt").write_text(result.text() + "\n")
    shutil.rmtree(results / "ginkgo", ignore_errors=True)
    return result
