"""Tests that `make bench` has a result of each server for each step, and that its servers leave
nothing behind."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest

from tests.bench import compare, servers
from tests.bench.load import Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_benchmark_measures_all_servers(tmp_path: Path) -> None:
    before = {*Path("/sys/fs/cgroup").glob("*/*")}
    with servers.running(tmp_path, servers.ALL) as running:
        benches = [Bench(server, tmp_path / f"load-{server.namespace}") for server in running]
        assert [bench.version.split()[0] for bench in benches] == ["containerd", "cri-o", "pyrunc"]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda bench: bench.rest("rest", 1), benches))
        for bench in benches:
            bench.round("p", 2, 2)
            bench.log("log")
        rows = [*compare.pods(benches), *compare.rates(benches, (*compare.MEMORY, *compare.LOGS))]
        assert [row.step for row in rows] == [
            *compare.STEPS,
            *compare.THROUGHPUT,
            *compare.MEMORY,
            *compare.LOGS,
        ]
        assert all(value > 0 for row in rows for value in row.values)
    left = {
        group.name for group in {*Path("/sys/fs/cgroup").glob("*/*")} - before if group.is_dir()
    }
    assert not {name for name in left if name.startswith(("crio", "k8s.io"))}
