"""Tests kubelet's optional policies on a node: whole processors and memory nodes for one pod, swap
for some pods, and eviction.

Each test restarts kubelet with other settings; for a pod that runs already, kubelet changes the
cgroup (UpdateContainerResources).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.pods import pod, shell
from tests.vm.kubelet.api import Json
from tests.vm.kubelet.node import PODS, Node, fact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
SWAP_FILE, SWAP_BYTES = Path("/swapfile"), 512 * MIB
WHOLE = {"cpu": "1", "memory": "128Mi"}
# the static policy needs the sum of systemReserved and evictionHard's default
RESERVED_MIB = 512 + 100


@pytest.fixture
def kubelet(node: Node) -> Iterator[Node]:
    """Provide the node, and restore kubelet's configuration after the test."""
    yield node
    node.configure_kubelet()


def limited(name: str, resources: Json, script: str = "sleep 3600") -> Json:
    """Return a pod whose only container has these `resources`."""
    return pod(name, shell(script, resources=resources))


def test_static_policies_pin_containers(kubelet: Node, removing: list[str]) -> None:
    """A guaranteed pod with whole processors gets them exclusively: other pods move away, and come
    back when it is removed."""
    kubelet.configure_kubelet(
        cpuManagerPolicy="static",
        cpuManagerReconcilePeriod="2s",
        reservedSystemCPUs="0",
        systemReserved={"memory": "512Mi"},
        memoryManagerPolicy="Static",
        reservedMemory=[{"numaNode": 0, "limits": {"memory": f"{RESERVED_MIB}Mi"}}],
    )
    removing += ["shared", "pinned"]
    # No CPU for this one: `pinned` needs the whole processor that is allocatable.
    shared = kubelet.run(limited("shared", {"requests": {"memory": "16Mi"}}))
    both = {"0-1", "0,1", ""}
    kubelet.until(
        lambda: fact(kubelet.group(shared), "cpuset.cpus") in both,
        "all processors for the first pod",
    )
    pinned = kubelet.run(limited("pinned", {"limits": WHOLE, "requests": WHOLE}))
    group = kubelet.group(pinned)
    assert (fact(group, "cpuset.cpus"), fact(group, "cpuset.cpus.effective")) == ("1", "1")
    assert (fact(group, "cpuset.mems"), fact(group, "cpuset.mems.effective")) == ("0", "0")
    assert os.sched_getaffinity(kubelet.main_pid(pinned)) == {1}
    kubelet.until(
        lambda: fact(kubelet.group(shared), "cpuset.cpus") == "0", "the first pod to move away"
    )
    assert os.sched_getaffinity(kubelet.main_pid(shared)) == {0}
    kubelet.remove("pinned")
    kubelet.until(
        lambda: fact(kubelet.group(shared), "cpuset.cpus") in both, "the first pod to come back"
    )


@pytest.fixture
def swap() -> Iterator[None]:
    """Provide the machine with a swap file during the test."""
    with open(SWAP_FILE, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, SWAP_BYTES)
    SWAP_FILE.chmod(0o600)
    for command in ("mkswap", "swapon"):
        subprocess.run([command, str(SWAP_FILE)], check=True, capture_output=True)
    yield
    subprocess.run(["swapoff", str(SWAP_FILE)], check=True)
    SWAP_FILE.unlink()


def test_limited_swap_is_for_burstable_pods(swap: None, kubelet: Node, removing: list[str]) -> None:
    """Burstable pods swap in proportion to their requests; guaranteed and best-effort pods do
    not."""
    kubelet.configure_kubelet(failSwapOn=False, memorySwap={"swapBehavior": "LimitedSwap"})
    limits: dict[str, Json] = {
        "may-swap": {"requests": {"memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "never": {
            "requests": {"memory": "64Mi", "cpu": "10m"},
            "limits": {"memory": "64Mi", "cpu": "10m"},
        },
        "nothing": {},
    }
    removing += limits
    kubelet.create(*(limited(name, resources) for name, resources in limits.items()))
    swap_max = {
        name: fact(kubelet.group(kubelet.ready(name)), "memory.swap.max") for name in limits
    }
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(facts["MemTotal"].split()[0]) * 1024
    swap_total = int(facts["SwapTotal"].split()[0]) * 1024
    expected = 256 * MIB * swap_total // total
    assert abs(int(swap_max["may-swap"]) - expected) <= os.sysconf("SC_PAGE_SIZE")
    assert (swap_max["never"], swap_max["nothing"]) == ("0", "0")


def test_kubelet_evicts_under_memory_pressure(kubelet: Node, removing: list[str]) -> None:
    """The node reports MemoryPressure; kubelet evicts the best-effort pod with much memory and
    keeps the one with little."""
    # Memory reserved for eviction is not allocatable, so the threshold is much less than the free
    # memory: otherwise pods would find no place.
    available = kubelet.summary()["node"]["memory"]["availableBytes"]
    kubelet.configure_kubelet(
        evictionHard={"memory.available": str(available - 1200 * MIB)},
        evictionPressureTransitionPeriod="5s",
    )
    removing += ["modest", "hungry"]
    modest = kubelet.run(
        limited("modest", {"requests": {"memory": "32Mi"}, "limits": {"memory": "64Mi"}})
    )
    # A dd whose output is not read holds the memory. (kubelet limits a volume in memory to the
    # allocatable memory.)
    hungry = pod(
        "hungry", shell("dd if=/dev/zero bs=1500M count=1 | sleep 3600"), restartPolicy="Never"
    )
    kubelet.create(hungry)
    kubelet.until(
        lambda: kubelet.pod("hungry")["status"].get("reason") == "Evicted",
        "the eviction",
        "hungry",
        300,
    )
    assert "low on resource: memory" in kubelet.pod("hungry")["status"]["message"]
    assert kubelet.api.get(f"{PODS}/modest")["status"]["phase"] == "Running"
    assert kubelet.main_pid(modest)

    def pressed() -> bool:
        conditions = {c["type"]: c["status"] for c in kubelet.node()["status"]["conditions"]}
        return conditions["MemoryPressure"] == "True"

    kubelet.remove("hungry")
    kubelet.until(lambda: not pressed(), "the end of the pressure", patience_s=300)
