"""Tests that the numbers that kubelet shows of pods are the kernel's and the disk's.

kubelet measures every ten seconds and serves its last measurement, so counters lie between two
readings of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.kube.pods import pod, shell
from tests.support import cri
from tests.vm.kubelet.api import Json
from tests.vm.kubelet.node import Node, fact

MIB = 1 << 20
# 24 MiB of memory that stays (shared memory is charged to the group that first touches it), 6 MiB
# in the writable layer, 3 MiB in a volume, three processes beside pause; and CPU time that grows.
SCRIPT = (
    "dd if=/dev/zero of=/dev/shm/held bs=1M count=24; dd if=/dev/zero of=/written bs=1M count=6; dd"
    " if=/dev/zero of=/v/volume bs=1M count=3; sync; touch /ready; sleep 7200 & sleep 7200 & while"
    " true; do i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; sleep 1; done"
)


@pytest.fixture(scope="module")
def busy(node: Node) -> Iterator[Json]:
    container = shell(
        SCRIPT,
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        resources={"limits": {"memory": "128Mi"}},
    )
    try:
        running = node.run(pod("busy", container, volumes=[{"name": "v", "emptyDir": {}}]))
        ready = Path(f"/proc/{node.main_pid(running)}/root/ready")
        node.until(ready.exists, "the pod's files")
        yield running
    finally:
        node.remove("busy")


@pytest.fixture(scope="module")
def numbers(node: Node, busy: Json) -> Json:
    """Return kubelet's numbers of the pod `busy`, measured after its script has written its
    files."""
    start = cpu_ns(node.group(busy))

    def measured() -> Json | None:
        for entry in node.summary()["pods"]:
            if entry["podRef"]["name"] == "busy":
                stats: Json = entry
                return stats if _complete(stats) and min(_cpu_times(stats)) > start else None
        return None

    pod_stats: Json = node.until(measured, "kubelet's numbers of the pod", "busy")
    return pod_stats


def _complete(entry: Json) -> bool:
    """Return whether every part was measured after the files were written; volumes are measured
    once a minute."""
    (container,) = entry.get("containers") or [{}]
    volumes = {v["name"]: v.get("usedBytes", 0) for v in entry.get("volume", [])}
    written = container.get("rootfs", {}).get("usedBytes", 0)
    return bool("memory" in container and written >= 6 * MIB and volumes.get("v", 0) >= 3 * MIB)


def _cpu_times(entry: Json) -> list[int]:
    """Return the CPU times of the pod and of the container, which kubelet measures at different
    moments."""
    (container,) = entry["containers"]
    return [int(part.get("cpu", {}).get("usageCoreNanoSeconds", 0)) for part in (entry, container)]


def cpu_ns(group: Path) -> int:
    """Return the CPU time of a group in nanoseconds."""
    lines = dict(line.split() for line in fact(group, "cpu.stat").splitlines())
    return int(lines["usage_usec"]) * 1000


def test_the_cpu_time_of_a_pod_is_the_kernels(node: Node, busy: Json, numbers: Json) -> None:
    (container,) = numbers["containers"]
    assert 0 < container["cpu"]["usageCoreNanoSeconds"] <= cpu_ns(node.group(busy))
    assert 0 < numbers["cpu"]["usageCoreNanoSeconds"] <= cpu_ns(node.pod_group(busy))


@pytest.mark.requirement("10.1.7", "10.1.8")
def test_the_memory_of_a_pod_is_the_kernels(node: Node, busy: Json, numbers: Json) -> None:
    (container,) = numbers["containers"]
    group = node.group(busy)
    inactive = dict(line.split() for line in fact(group, "memory.stat").splitlines())[
        "inactive_file"
    ]
    working = int(fact(group, "memory.current")) - int(inactive)
    assert 24 * MIB <= container["memory"]["workingSetBytes"] <= working + 8 * MIB
    assert container["memory"]["workingSetBytes"] <= container["memory"]["usageBytes"] <= 128 * MIB
    assert (
        container["memory"]["availableBytes"] == 128 * MIB - container["memory"]["workingSetBytes"]
    )


@pytest.mark.requirement("10.1.12")
def test_the_size_of_the_writable_layer_is_the_disks(numbers: Json) -> None:
    (container,) = numbers["containers"]
    assert 6 * MIB <= container["rootfs"]["usedBytes"] < 7 * MIB


def test_the_usage_of_a_volume_and_of_the_pods_storage_is_reported(numbers: Json) -> None:
    (volume,) = [v for v in numbers["volume"] if v["name"] == "v"]
    assert 3 * MIB <= volume["usedBytes"] < 4 * MIB
    assert 9 * MIB <= numbers["ephemeral-storage"]["usedBytes"] < 11 * MIB


@pytest.mark.requirement("10.1.14")
def test_the_number_of_processes_is_reported(node: Node, busy: Json) -> None:
    # kubelet's summary leaves the number out.
    with cri.connect(node.socket) as client:
        filter_ = api.PodSandboxFilter(label_selector={"io.kubernetes.pod.name": "busy"})
        (sandbox,) = client.runtime.ListPodSandbox(api.ListPodSandboxRequest(filter=filter_)).items
        request = api.PodSandboxStatsRequest(pod_sandbox_id=sandbox.id)
        count = client.runtime.PodSandboxStats(
            request, timeout=60
        ).stats.linux.process.process_count.value
    # pause, the shell, its two background sleeps, and from time to time a third sleep
    assert 4 <= count <= 5
    assert abs(count - int(fact(node.pod_group(busy), "pids.current"))) <= 1


@pytest.mark.requirement("10.1.5")
def test_pods_and_containers_have_pressure_figures(numbers: Json) -> None:
    (container,) = numbers["containers"]
    # Pressure stall information is on by default since Kubernetes 1.34.
    for part in (container["cpu"], container["memory"], numbers["cpu"]):
        assert {"full", "some"} <= set(part["psi"])


def test_the_figures_of_the_node_are_the_machines(node: Node) -> None:
    node_stats = node.summary()["node"]
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(facts["MemTotal"].split()[0]) * 1024
    assert node.node()["status"]["capacity"]["memory"] == f"{total // 1024}Ki"
    assert 0 < node_stats["memory"]["workingSetBytes"] < total
    disk = os.statvfs("/var/lib/pyrunc")
    for where in (node_stats["fs"], node_stats["runtime"]["imageFs"]):
        assert where["capacityBytes"] == disk.f_blocks * disk.f_frsize
        assert abs(where["availableBytes"] - disk.f_bavail * disk.f_frsize) < 64 * MIB
