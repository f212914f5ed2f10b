"""Kubernetes' own tests of what a node promises, `[NodeConformance]`, on a one-node cluster: every one of them passes.

They are the program that Kubernetes' releases are tested with, built from its module. ginkgo runs several specs at a time:
they wait for most of it. Their images are made here and come from the cluster's registry.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube_e2e import images
from tests.support import ledger, session, toolchain
from tests.support.cluster import Cluster

PROCESSES = 10
TIMEOUT_S = 4200
FOCUS = r"\[NodeConformance\]"
SKIP = (r"\[Slow\]", r"\[Disruptive\]", r"\[Flaky\]")
FEWEST = 200
"""Specs that pass at least: fewer are a wrong selection."""

Spec = dict[str, Any]


def without_dummies() -> bool:
    """Whether this kernel has no dummy network devices."""
    command = ["unshare", "--net", "ip", "link", "add", "dummy0", "type", "dummy"]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    before = ledger.take()
    running = Cluster(tmp_path / "cluster", session.name("e2e"))
    try:
        running.up([images.archive()])
        yield running
    finally:
        running.down()
    left = ledger.settle(before)
    assert not left, "the cluster left behind:\n  " + "\n  ".join(left)


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 300)
def test_every_spec_passes(cluster: Cluster, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat("/tmp").st_mode) == 0o1777, (
        "specs about hostPath expect the usual mode of the node's /tmp"
    )
    skip = [*SKIP, *(["PrivilegedPod"] if without_dummies() else [])]
    specs = run_specs(cluster, tmp_path, skip)
    bad = [shown(spec) for spec in specs if spec["State"] not in ("passed", "skipped", "pending")]
    assert not bad, f"{len(bad)} specs failed:\n\n" + "\n\n".join(bad)
    assert len([spec for spec in specs if spec["State"] == "passed"]) >= FEWEST


def run_specs(cluster: Cluster, folder: Path, skip: list[str]) -> list[Spec]:
    """Run the selected specs; what ginkgo reports of them."""
    programs = toolchain.e2e()
    command = [
        str(programs / "ginkgo"), f"--procs={PROCESSES}", f"--timeout={TIMEOUT_S}s", f"--focus={FOCUS}", f"--skip={'|'.join(skip)}",
        "--no-color", "--json-report=report.json", f"--output-dir={folder}", str(programs / "e2e.test"), "--",
        f"--kubeconfig={cluster.kubeconfig}", "--provider=local", f"--kubectl-path={cluster.bin}/kubectl",
        f"--container-runtime-endpoint=unix://{cluster.node.socket}", f"--kubelet-root-dir={cluster.node.folder}/kubelet",
        "--disable-log-dump", f"--e2e-output-dir={folder}",
    ]  # fmt: skip
    log = folder / "ginkgo.log"
    with open(log, "wb") as output, _in_a_group_of_its_own(command, output, folder) as running:
        running.wait(TIMEOUT_S + 120)
    report = folder / "report.json"
    assert report.exists(), (
        f"ginkgo ended with {running.returncode}:\n{log.read_text(errors='replace')[-4000:]}"
    )
    return [
        spec
        for suite in json.loads(report.read_text())
        for spec in suite["SpecReports"]
        if spec["LeafNodeType"] == "It" or spec["State"] not in ("passed", "skipped", "pending")
    ]


@contextlib.contextmanager
def _in_a_group_of_its_own(
    command: list[str], output: Any, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The programs that ginkgo starts end with it, also when this test is ended early."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, start_new_session=True
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def shown(spec: Spec) -> str:
    """A spec's name, state and failure."""
    name = " ".join([*(spec["ContainerHierarchyTexts"] or []), spec["LeafNodeText"] or spec["LeafNodeType"]])
    failure = spec.get("Failure", {})
    place = failure.get("Location", {})
    return f"{spec['State']}: {name}\n{failure.get('Message', '')[:3000]}\n{place.get('FileName')}:{place.get('LineNumber')}"
