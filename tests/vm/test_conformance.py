"""Runs in a guest those parts of conformance suites that need the controllers of cgroup v2:
Kubernetes' specs of pods that are resized, with the suite and the control plane on the host, and
containerd's tests that measure memory or choose processors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kube_conformance import limits, suite
from tests.kube_e2e import images
from tests.support import guest_disk, guest_node, toolchain
from tests.support.guest import SERVICES, Guest, free_port
from tests.support.guest_control import GuestControlPlane
from tests.vm import remote
from tests.vm.conftest import RELEASE, Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow]

TIMEOUT_S = 3000
# The API server reaches kubelet by this name, which is 127.0.0.1 here; kubelet's port is forwarded
# under the same number.
NODE = "localhost"
CACHE = "/root/.cache/pyrunc"


@dataclass(frozen=True)
class Machine:
    """The guest. `kubelet_port`: kubelet's port, the same in the guest and, forwarded, on 127.0.0.1
    of the host."""

    guest: Guest
    kubelet_port: int


@pytest.fixture(scope="module")
def machine(boots: Boots) -> Iterator[Machine]:
    """Provide a guest with a disk that has containerd's tests and the images of Kubernetes'
    suite."""
    boots.stop()
    port = free_port()
    program = toolchain.containerd_integration()
    files = {str(program.relative_to(toolchain.cache())): program, "e2e.tar": images.archive()}
    disks = [guest_disk.kubernetes(), guest_disk.of_files("suites", files)]
    guest = Guest(RELEASE, disks=disks, services={6443: boots.api_port}, forward={port: port})
    try:
        guest.start()
        guest.push_project()
        guest.ssh(f"mkdir -p {CACHE} && mount -o ro /dev/disk/by-label/suites {CACHE}")
        yield Machine(guest, port)
    finally:
        guest.stop()


@pytest.mark.timeout(3000)
def test_containerds_tests_of_controllers_pass(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.run(machine.guest, "tests/vm/suites", capsys, timeout_s=2400)


@pytest.fixture
def cluster(machine: Machine, boots: Boots, tmp_path: Path) -> Iterator[suite.Target]:
    """Provide a cluster of one node in the guest."""
    control = GuestControlPlane(tmp_path / "control", boots.api_port, by_name=True)
    settings = {
        "port": machine.kubelet_port,
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
    }
    machine.guest.ssh(
        "mkdir -p /etc/kubernetes/kubelet.conf.d && cat"
        " >/etc/kubernetes/kubelet.conf.d/40-port.conf",
        stdin=json.dumps(settings).encode(),
    )
    try:
        control.start()
        print(
            guest_node.provision(
                machine.guest,
                settings={"API_SERVER": SERVICES, "NODE": NODE},
                authority=control.folder,
            )
        )
        machine.guest.ssh(f"pyrunc-cri load -i {CACHE}/e2e.tar")
        yield suite.Target(control.kubeconfig())
    finally:
        control.stop()


@pytest.mark.timeout(TIMEOUT_S + 1800)
def test_pods_are_resized(
    cluster: suite.Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    focus = "|".join(map(re.escape, limits.WITHOUT_CONTROLLERS))
    result = suite.run(cluster, tmp_path / "results", focus, 1, TIMEOUT_S)
    with capsys.disabled():
        print("", *result.passed, result.text(), sep="\n    ")
    assert len(result.passed) == result.total == 6, (tmp_path / "results" / suite.LOG).read_text()[
        -20_000:
    ]
