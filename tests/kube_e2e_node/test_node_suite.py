"""Runs Kubernetes' node suite, which starts and restarts its own kubelet: every spec that can run
on this machine passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube_e2e.test_node_conformance import without_dummies
from tests.kube_e2e_node import images
from tests.kube_e2e_node.suite import SuiteNode
from tests.support import ginkgo, ledger, session

PROCESSES = 8
TIMEOUT_S = 3600
FEWEST, FEWEST_SERIAL, FEWEST_PROXIED = 450, 50, 10
"""Specs that pass at least: fewer are a wrong selection."""
SKIP = (
    r"\[Slow\]",
    r"\[Serial\]",
    r"\[Disruptive\]",
    r"\[Flaky\]",
    r"\[Benchmark\]",
    r"\[Alpha\]",
    "OffByDefault",
    "StandaloneMode",
    "SeparateDiskGC",
    # Resizing needs controllers in the v2 tree; the guest runs some of these.
    "InPlacePod",
    "InPlace Resize",
    # Without a cgroup for each pod (`cgroupsPerQOS`) kubelet 1.36 ends with a nil pointer at the
    # first pod with pod-level resources: `doPodResizeAction` reads a field that
    # `podContainerManagerNoop` lacks. The guest runs some of these.
    "PodLevelResources",
    # This kernel has no SCTP sockets.
    "SCTP",
    # An image by the digest of the original's bytes.
    r"\[Feature:ImageID\]",
    # The guest has CRIU.
    "CheckpointContainer",
    # Without kubelet's gate PodAndContainerStatsFromCRI the specs of the Summary API need network
    # and processes of a pod from cAdvisor, which knows only the containers of containerd and CRI-O.
    # With the gate they need figures that a hybrid host lacks: the groups of kubelet, of the
    # runtime and of other processes, limits of memory, and pressure of pods, which have no groups.
    # They pass in the guest, with the gate (tests/vm/test_node_suite.py).
    "Summary API",
    # Needs the containers' names from cAdvisor, and skips itself with the gate. In the guest it
    # fails as well: cAdvisor has the containers' groups there, with no name, image or labels
    # (docs/operate.md).
    "ContainerMetrics",
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SuiteNode]:
    with ledger.nothing_left("the suite"):
        running = SuiteNode(tmp_path / "node", session.name("e2enode"))
        try:
            running.up(images.archives())
            yield running
        finally:
            running.down()


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 300)
def test_every_parallel_spec_passes(node: SuiteNode) -> None:
    skip = [*SKIP, *(["PrivilegedPod"] if without_dummies() else [])]
    specs = node.run("", skip, TIMEOUT_S, PROCESSES)
    ginkgo.assert_passed(specs, FEWEST, node.log)


# Specs that need their own node: they change kubelet's configuration and restart it.
SERIAL = (
    # Of these, "Keeps device plugin assignments after kubelet restart and device plugin restart"
    # can fail on a loaded machine: it asks kubelet once for the devices of its pods, maybe before
    # the restarted kubelet has its pods (kubernetes issue 128114).
    r"Device Plugin \[Serial\]",
    r"POD Resources API \[Serial\]",
    "Ensure Credential Pulled Images",
    # Not ImageGarbageCollect: it ends with a pull of all images of the suite's list, by their names
    # in the world.
    r"\] GarbageCollect \[Serial\]",
    "ContainerLogRotation",
    r"MirrorPod \[Serial\]",
    r"StaticPod \[Serial\]",
    r"SeccompDefault \[Serial\]",
    r"Not Change Container Status",
)
# Those of PodResources skip themselves where fewer than four processors are.
SERIAL_SKIP = (
    r"\[Slow\]",
    r"\[Flaky\]",
    "SRIOV",
    r"\[Alpha\]",
    "OffByDefault",
    # It turns off kubelet's gate KubeletPodResourcesListUseActivePods, then skips itself with fewer
    # than eight processors. The gate stays off, and specs of device plugins that run later fail.
    "restricted list output disabled",
)


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 300)
def test_every_serial_spec_passes(node: SuiteNode) -> None:
    specs = node.run("|".join(SERIAL), SERIAL_SKIP, TIMEOUT_S)
    ginkgo.assert_passed(specs, FEWEST_SERIAL, node.log)


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 300)
def test_every_spec_behind_a_proxy_of_the_socket_passes(node: SuiteNode) -> None:
    """The proxy is the suite's own: it stands between kubelet and the server, and injects
    errors."""
    options = ("--cri-proxy-enabled=true",)
    specs = node.run(r"\[Feature:CriProxy\]", SERIAL_SKIP, TIMEOUT_S, 1, *options)
    ginkgo.assert_passed(specs, FEWEST_PROXIED, node.log)
