"""Tests a real kubelet in the guest, under systemd and pure cgroup v2, set up as Vagrant does it.
The control plane runs on the host: emulated it would take most of the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import guest_node
from tests.support.guest import SERVICES, Guest
from tests.support.guest_control import GuestControlPlane
from tests.vm import remote
from tests.vm.conftest import Boots

INSIDE = "tests/vm/kubelet"


@pytest.fixture(scope="module")
def node(guest: Guest, boots: Boots, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """Provide the guest as a Kubernetes node. Its control plane ends after these tests; the guest
    stays set up as a node until it is powered off."""
    control = GuestControlPlane(tmp_path_factory.mktemp("control"), boots.api_port)
    try:
        control.start()
        print(
            guest_node.provision(guest, settings={"API_SERVER": SERVICES}, authority=control.folder)
        )
        yield guest
    finally:
        control.stop()


@pytest.mark.guest
@pytest.mark.timeout(3600)
def test_tests_with_kubelet_pass(node: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    """With the systemd driver, the tests check pods' QoS classes, limits, resize, OOM kills,
    AppArmor, user namespaces, the server's unit, and the numbers that kubelet shows."""
    remote.run(node, f"-m 'not slow' {INSIDE}", capsys, timeout_s=3300)


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_slow_tests_with_kubelet_pass(node: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    """The slow tests check the cgroupfs driver, static CPU and memory policies, swap, eviction, and
    the watchdog."""
    remote.run(node, f"-m slow {INSIDE}", capsys, timeout_s=2700)
