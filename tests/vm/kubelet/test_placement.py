"""Tests the cgroups of kubelet's pods and of our containers, and the limits in them, with both
cgroup drivers. kubelet writes the pods' groups, our server the containers'."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kube.pods import pod, shell
from tests.support.processes import wait_until
from tests.vm.kubelet.api import Json
from tests.vm.kubelet.node import CGROUPS, KUBELET_DROP_IN, PODS, Node, fact, systemctl

MIB = 1 << 20
CONFIG = Path("/etc/pyrunc/config.toml")
PIDS_PER_POD = 512  # as set by vagrant/provision.sh
RESERVED_BYTES = 512 * MIB
GUARANTEED = {"cpu": "200m", "memory": "64Mi"}
RESOURCES: dict[str, Json] = {
    "guaranteed": {"requests": GUARANTEED, "limits": GUARANTEED},
    "burstable": {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"memory": "96Mi"}},
    "besteffort": {},
    "hugepages": {
        "requests": {"cpu": "50m", "memory": "32Mi"},
        "limits": {"memory": "32Mi", "cpu": "50m", "hugepages-2Mi": "4Mi"},
    },
}
CLASS = {
    "guaranteed": "Guaranteed",
    "burstable": "Burstable",
    "besteffort": "BestEffort",
    "hugepages": "Guaranteed",
}


@dataclass
class Placed:
    """The pods that run with one cgroup driver."""

    node: Node
    pods: dict[str, Json]

    def group(self, name: str) -> Path:
        return self.node.group(self.pods[name])

    def pod_group(self, name: str) -> Path:
        return self.node.pod_group(self.pods[name])


@pytest.fixture(
    scope="module", params=["systemd", pytest.param("cgroupfs", marks=pytest.mark.slow)]
)
def placed(request: pytest.FixtureRequest, node: Node) -> Iterator[Placed]:
    if request.param != "systemd":
        use_driver(node, request.param)
    manifests = [
        pod(name, shell("sleep 3600", resources=resources)) for name, resources in RESOURCES.items()
    ]
    try:
        node.create(*manifests)
        yield Placed(node, {name: node.ready(name) for name in RESOURCES})
    finally:
        node.remove(*RESOURCES)
        if request.param != "systemd":
            use_driver(node, "systemd")


def weight(shares: int) -> str:
    """Return the cpu.weight that a container gets for `shares`, converted as by runc 1.5 and
    crun."""
    # kubelet's own groups have the older, linear conversion.
    logarithm = math.log2(shares)
    return str(math.ceil(10 ** ((logarithm**2 + 125 * logarithm) / 612 - 7 / 34)))


def use_driver(node: Node, driver: str) -> None:
    """Restart server and kubelet with another cgroup driver, while no pod runs."""
    CONFIG.write_text(re.sub(r'driver = "\w+"', f'driver = "{driver}"', CONFIG.read_text()))
    systemctl("restart", "pyrunc-cri")
    node.configure_kubelet(cgroupDriver=driver)
    node.driver = driver
    if driver == "systemd":
        KUBELET_DROP_IN.unlink()


@pytest.mark.parametrize("name", RESOURCES)
def test_a_pod_is_in_the_group_of_its_class(placed: Placed, name: str) -> None:
    assert placed.pods[name]["status"]["qosClass"] == CLASS[name]
    group = placed.group(name)
    pid = placed.node.main_pid(placed.pods[name])
    # execve(2) closes the start's socket before it sets the process's arguments
    command = Path(f"/proc/{pid}/cmdline")
    assert wait_until(lambda: command.read_bytes() == b"sleep\x003600\x00", 30), (
        command.read_bytes()
    )
    assert Path(f"/proc/{pid}/cgroup").read_text() == f"0::/{group.relative_to(CGROUPS)}\n"
    assert not fact(placed.pod_group(name), "cgroup.procs"), "a pod's own group holds no process"


@pytest.mark.parametrize("name", RESOURCES)
def test_the_sandbox_is_in_the_pods_group_too(placed: Placed, name: str) -> None:
    leaves = [g for g in placed.pod_group(name).iterdir() if g.is_dir() and g != placed.group(name)]
    commands = [
        Path(f"/proc/{pid}/cmdline").read_text()
        for g in leaves
        for pid in fact(g, "cgroup.procs").split()
    ]
    assert ["pause" in command for command in commands] == [True], commands


def test_a_guaranteed_pod_has_its_cpu_and_memory_limits(placed: Placed) -> None:
    for group in (placed.group("guaranteed"), placed.pod_group("guaranteed")):
        assert fact(group, "cpu.max") == "20000 100000"
        assert fact(group, "memory.max") == str(64 * MIB)
    assert fact(placed.group("guaranteed"), "cpu.weight") == weight(204)


def test_a_burstable_pod_has_its_cpu_and_memory_limits(placed: Placed) -> None:
    for group in (placed.group("burstable"), placed.pod_group("burstable")):
        assert fact(group, "cpu.max").startswith("max ")
        assert fact(group, "memory.max") == str(96 * MIB)
    assert fact(placed.group("burstable"), "cpu.weight") == weight(102)


def test_a_best_effort_pod_has_no_cpu_and_memory_limits(placed: Placed) -> None:
    for group in (placed.group("besteffort"), placed.pod_group("besteffort")):
        assert fact(group, "cpu.max").startswith("max ")
        assert fact(group, "memory.max") == "max"
        assert fact(group, "cpu.weight") == "1"


def test_containers_do_not_swap_by_default(placed: Placed) -> None:
    assert {
        fact(placed.group(name), "memory.swap.max") for name in ("guaranteed", "burstable")
    } == {"0"}


@pytest.mark.requirement("7.2.11")
def test_an_oom_kill_ends_the_whole_container(placed: Placed) -> None:
    # kubelet sets this file through `unified` (singleProcessOOMKill is off on v2).
    assert {fact(placed.group(name), "memory.oom.group") for name in RESOURCES} == {"1"}


@pytest.mark.requirement("7.2.10")
def test_a_pod_has_its_pids_limit(placed: Placed) -> None:
    assert {fact(placed.pod_group(name), "pids.max") for name in RESOURCES} == {str(PIDS_PER_POD)}


def test_a_pod_has_its_limit_of_huge_pages(placed: Placed) -> None:
    for group in (placed.group("hugepages"), placed.pod_group("hugepages")):
        assert fact(group, "hugetlb.2MB.max") == str(4 * MIB)
    assert fact(placed.group("guaranteed"), "hugetlb.2MB.max") == "0"


@pytest.mark.requirement("7.2.6")
def test_processes_have_the_oom_score_of_their_class(placed: Placed) -> None:
    scores = {
        name: int(
            Path(f"/proc/{placed.node.main_pid(placed.pods[name])}/oom_score_adj").read_text()
        )
        for name in RESOURCES
    }
    assert (scores["guaranteed"], scores["besteffort"]) == (-997, 1000)
    assert 2 < scores["burstable"] < 1000


def test_the_limit_of_all_pods_leaves_the_reserved_memory(placed: Placed) -> None:
    top = CGROUPS / ("kubepods.slice" if placed.node.driver == "systemd" else "kubepods")
    status = placed.node.node()["status"]
    capacity = _bytes(status["capacity"]["memory"])
    huge = _bytes(status["capacity"]["hugepages-2Mi"])
    assert int(fact(top, "memory.max")) == capacity - RESERVED_BYTES
    # evictionHard's default keeps 100 MiB more from the scheduler, and huge pages are not memory
    assert _bytes(status["allocatable"]["memory"]) == capacity - RESERVED_BYTES - 100 * MIB - huge
    assert status["allocatable"]["cpu"] == f"{int(status['capacity']['cpu']) * 1000 - 200}m"


def _bytes(quantity: str) -> int:
    units = {"Ki": 1 << 10, "Mi": MIB, "Gi": 1 << 30}
    return int(quantity[:-2]) * units[quantity[-2:]] if quantity[-2:] in units else int(quantity)


# The last test, because it changes a pod.
def test_a_pod_is_resized_in_place(placed: Placed) -> None:
    """When the limits grow and when they shrink, the kernel's files follow and the process
    stays."""
    node, name = placed.node, "guaranteed"
    group, pid = placed.group(name), node.main_pid(placed.pods[name])
    for cpu, mebibytes in ((300, 128), (100, 48)):
        resize(node, name, {"cpu": f"{cpu}m", "memory": f"{mebibytes}Mi"})
        expected = {"cpu.max": f"{cpu * 100} 100000", "memory.max": str(mebibytes * MIB)}
        for where in (group, placed.pod_group(name)):
            node.until(
                lambda w=where, f=expected: {k: fact(w, k) for k in f} == f,
                f"{expected} in {where}",
                name,
            )  # type: ignore[misc]
        assert fact(group, "cpu.weight") == weight(cpu * 1024 // 1000)
    resized = node.until(lambda: _resized(node, name), "the status of the resize", name)
    assert resized["restartCount"] == 0
    assert resized["resources"]["limits"] == {"cpu": "100m", "memory": "48Mi"}
    assert node.main_pid(node.pod(name)) == pid


def resize(node: Node, name: str, limits: Json) -> None:
    """Call the `resize` subresource for a container of class Guaranteed."""
    change = {
        "spec": {"containers": [{"name": "c", "resources": {"limits": limits, "requests": limits}}]}
    }
    node.api.patch(f"{PODS}/{name}/resize", change)


def _resized(node: Node, name: str) -> Json | None:
    (status,) = node.pod(name)["status"]["containerStatuses"]
    container_status: Json = status
    return (
        container_status
        if container_status.get("resources", {}).get("limits", {}).get("memory") == "48Mi"
        else None
    )
