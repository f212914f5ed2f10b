"""Runs a handful of conformance specs from several parts of Kubernetes on two nodes; `make
conformance` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kube_conformance import cluster, suite
from tests.support import ledger

TIMEOUT_S = 1200
FOCUS = "|".join(
    (
        "should provide DNS for the cluster",
        "should serve a basic endpoint from pods",
        "ReplicaSet should serve a basic image on each replica",
        "should mutate pod and apply defaults after mutation",
        "EmptyDir volumes should support .root,0644,tmpfs.",
        "OIDC discovery",
    )
)


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 900)
def test_specs_of_several_parts_pass(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("specs")  # short: kubelet's sockets are below
    with ledger.nothing_left("the cluster"):
        with cluster.running(folder / "cluster") as running:
            result = suite.run(
                suite.on_this_machine(running), folder / "results", FOCUS, 4, TIMEOUT_S
            )
        assert len(result.passed) == result.total == 6, result.text()
        assert (folder / "results" / suite.JUNIT).exists() and (
            folder / "results" / suite.LOG
        ).exists()
