"""Tests that `make bench-kubelet` measures each server, and leaves no cgroups of the servers and
nothing of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import kubelet, servers
from tests.support import ledger

pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_benchmark_measures_pods_on_each_server(tmp_path: Path) -> None:
    with ledger.nothing_left("the cluster"):
        groups = {*Path("/sys/fs/cgroup").glob("*/*")}
        with kubelet.cluster(tmp_path, servers.ALL) as cluster:
            result = kubelet.measure(cluster, pods=2, rounds=1)
        assert [version.split()[0] for version in result.versions] == [
            "containerd",
            "cri-o",
            "pyrunc",
        ]
        (rows,) = result.groups.values()
        assert [row.step for row in rows] == list(kubelet.UNITS)
        assert all(value > 0 for row in rows[:2] for value in row.values)
    names = {group.name for group in {*Path("/sys/fs/cgroup").glob("*/*")} - groups}
    assert not {name for name in names if name.startswith(("crio", "k8s.io"))}
