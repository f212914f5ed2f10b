"""Tests the figures that kubelet reports of pods: by default, with some from cAdvisor, and with the
feature gate `PodAndContainerStatsFromCRI`, with all from the server. docs/operate.md has the
table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.kube.pods import Kube, pod, shell

GATE = {"featureGates": {"PodAndContainerStatsFromCRI": True}}
PATIENCE_S = 90.0
CPU, MEMORY = "container_cpu_usage_seconds_total", "container_memory_working_set_bytes"
SCRIPT = "while true; do i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; sleep 0.5; done"


def query(kube: Kube, path: str) -> str:
    """Return kubelet's reply for `path`; empty while kubelet starts."""
    raw = f"/api/v1/nodes/{kube.cluster.node.host}/proxy/{path}"
    done = kube.cluster.kubectl("get", "--raw", raw, check=False)
    return done.stdout if done.returncode == 0 else ""


def entry(kube: Kube) -> dict[str, Any] | None:
    """Return the pod's entry in kubelet's summary; None before kubelet has measured its CPU
    twice."""
    for each in json.loads(query(kube, "stats/summary") or '{"pods": []}')["pods"]:
        if each["podRef"]["namespace"] == kube.namespace:
            (container,) = each.get("containers") or [{}]
            return dict(each) if "usageNanoCores" in container.get("cpu", {}) else None
    return None


def of_pod(kube: Kube, path: str) -> list[Sample]:
    """Return the pod's samples among kubelet's Prometheus metrics at `path`."""
    families = text_string_to_metric_families(query(kube, path))
    samples = [sample for family in families for sample in family.samples]
    return [sample for sample in samples if sample.labels.get("namespace") == kube.namespace]


def names(entries: list[Sample], container: str) -> set[str]:
    return {sample.name for sample in entries if sample.labels.get("container") == container}


def check_what_is_always_there(kube: Kube) -> dict[str, Any]:
    """Check the figures that `kubectl top`, autoscaling and evictions read; return the pod's entry
    in kubelet's summary."""
    entries: dict[str, Any] = kube.until(lambda: entry(kube), "the pod's figures", PATIENCE_S)
    (container,) = entries["containers"]
    assert {"cpu", "memory", "rootfs", "logs"} <= set(container)
    assert {"cpu", "memory", "ephemeral-storage"} <= set(entries)
    for part in (entries, container):
        assert part["cpu"]["usageCoreNanoSeconds"] > 0 and part["memory"]["workingSetBytes"] >= 0
    kube.until(
        lambda: {CPU, MEMORY} <= names(of_pod(kube, "metrics/resource"), "c"),
        "metrics/resource",
        PATIENCE_S,
    )
    return entries


@pytest.mark.timeout(600)
def test_kubelet_serves_figures_by_default_and_with_the_gate(kube: Kube) -> None:
    kube.run(pod("figures", shell(SCRIPT)))
    entries = check_what_is_always_there(kube)
    assert "network" not in entries and "process_stats" not in entries
    # On a machine with controllers on cgroup v1 cAdvisor sees none of the server's groups.
    assert not [s for s in of_pod(kube, "metrics/cadvisor") if s.labels.get("container")]
    try:
        kube.cluster.restart_kubelet(**GATE)
        entries = check_what_is_always_there(kube)
        assert entries["network"]["name"] == "eth0" and entries["network"]["rxBytes"] > 0
        assert entries["process_stats"]["process_count"] >= 2
        series = of_pod(kube, "metrics/cadvisor")
        assert {CPU, MEMORY, "container_fs_usage_bytes", "container_processes"} <= names(
            series, "c"
        )
        assert all(s.labels["image"] for s in series if s.labels["container"])
        (received,) = [s for s in series if s.name == "container_network_receive_bytes_total"]
        assert received.labels["interface"] == "eth0" and received.value > 0
    finally:
        kube.cluster.restart_kubelet()
