"""Runs Kubernetes' own tests of a node's guarantees, `[NodeConformance]`, on a one-node cluster:
every one passes.

The program is that of Kubernetes' releases, built from its module. The images of its specs are made
here and come from the cluster's registry.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube_e2e import images
from tests.support import ginkgo, ledger, session, toolchain
from tests.support.cluster import Cluster

PROCESSES = 10
TIMEOUT_S = 4200
FOCUS = r"\[NodeConformance\]"
SKIP = (r"\[Slow\]", r"\[Disruptive\]", r"\[Flaky\]")
FEWEST = 200
"""Specs that pass at least: fewer are a wrong selection."""

LOG, REPORT = "ginkgo.log", "report.json"


def without_dummies() -> bool:
    """Return whether this kernel lacks dummy network devices."""
    command = ["unshare", "--net", "ip", "link", "add", "dummy0", "type", "dummy"]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ledger.nothing_left("the cluster"):
        running = Cluster(tmp_path / "cluster", session.name("e2e"))
        try:
            running.up([images.archive()])
            yield running
        finally:
            running.down()


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 300)
def test_every_spec_passes(cluster: Cluster, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat("/tmp").st_mode) == 0o1777, (
        "specs about hostPath expect the usual mode of the node's /tmp"
    )
    skip = [*SKIP, *(["PrivilegedPod"] if without_dummies() else [])]
    run_specs(cluster, tmp_path, skip)
    ginkgo.assert_passed(ginkgo.specs(tmp_path / REPORT), FEWEST, tmp_path / LOG)


def run_specs(cluster: Cluster, folder: Path, skip: list[str]) -> None:
    """Run the [NodeConformance] specs that match no pattern of `skip`; write REPORT and LOG into
    `folder`."""
    programs = toolchain.e2e()
    command = [
        str(programs / "ginkgo"),
        f"--procs={PROCESSES}",
        f"--timeout={TIMEOUT_S}s",
        f"--focus={FOCUS}",
        f"--skip={'|'.join(skip)}",
        "--no-color",
        f"--json-report={REPORT}",
        f"--output-dir={folder}",
        str(programs / "e2e.test"),
        "--",
        f"--kubeconfig={cluster.kubeconfig}",
        "--provider=local",
        f"--kubectl-path={cluster.bin}/kubectl",
        f"--container-runtime-endpoint=unix://{cluster.node.socket}",
        f"--kubelet-root-dir={cluster.node.folder}/kubelet",
        "--disable-log-dump",
        f"--e2e-output-dir={folder}",
    ]
    ginkgo.run(command, folder / LOG, TIMEOUT_S + 120)
