"""Runs the specs of Kubernetes' node suite that need cgroup v2 with kubelet's groups of pods;
tests/kube_e2e_node skips them on a hybrid host.

The guest's processor is emulated, so only a few specs of each kind run: half an hour for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support import ginkgo
from tests.support.guest import Guest
from tests.vm import node_suite
from tests.vm.conftest import RELEASE, Boots
from tests.vm.node_suite import NodeSuite

pytestmark = [pytest.mark.guest, pytest.mark.slow]

TIMEOUT_S = 3600
# With kubelet's gate: without it kubelet takes network and processes of a pod from cAdvisor, which
# knows only the containers of containerd and CRI-O (docs/operate.md).
STATS_FROM_CRI = "--feature-gates=PodAndContainerStatsFromCRI=true"
PARALLEL = (
    "Summary API .* should report resource usage",
    "ResourceMetricsAPI",
    "Kubelet Cgroup Manager",
    "PodOverhead handling",
    "default limits.cpu/memory from pod level resources$",
    "PLR Pod InPlace Resize .* pod-level resize with limits add",
    "decrease pod-level memory limit below usage",
    "Pod InPlace Resize Init Container",
)
# Without MemoryQoS of a container: those specs look for the container's group by the names of
# containerd and CRI-O.
SERIAL = (
    "Summary API .* under pressure",
    "OOMKiller",
    "PodPidsLimit",
    "Container Manager Misc",
    (
        r"Pod Level Resources \[Serial\] .*(no container resources|limits, container resources"
        r" requests)$"
    ),
    r"Swap .*\[NodeConformance\] with configuration",
    "Swap .* Basic functionality with configuration QOS (Burstable|Guaranteed)$",
    "MemoryQoS .*(memory.min for Guaranteed|memory.low = sum)",
    r"HugePages \[Serial\] .* only one hugepages resource",
    r"CriticalPod \[Serial\]",
)


@pytest.fixture(scope="module")
def suite(boots: Boots, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSuite]:
    boots.stop()
    with Guest(RELEASE, disks=[node_suite.disk()], memory_mib=6144) as guest:
        guest.push_project()
        installed = NodeSuite(guest, tmp_path_factory.mktemp("node-suite"))
        installed.install()
        yield installed


@pytest.mark.timeout(TIMEOUT_S + 900)
@pytest.mark.parametrize(
    ("focus", "processes", "options", "fewest"),
    [(PARALLEL, 3, (STATS_FROM_CRI,), 11), (SERIAL, 1, (), 34)],
    ids=["parallel", "serial"],
)
def test_specs_that_need_cgroup_v2_pass(
    suite: NodeSuite,
    focus: Sequence[str],
    processes: int,
    options: Sequence[str],
    fewest: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    specs = suite.run(focus, (), TIMEOUT_S, processes, *options)
    with capsys.disabled():
        for spec in ginkgo.selected(specs):
            print(f"    {spec['State']} in {spec['RunTime'] / 1e9:.0f} s: {ginkgo.name(spec)}")
    ginkgo.assert_passed(specs, fewest, suite.folder / "ginkgo.log")
