"""A real kubelet with its control plane in the guest, under systemd and pure cgroup v2, set up as Vagrant does it."""

from __future__ import annotations

import pytest

from tests.support import guest_node
from tests.support.guest import Guest
from tests.vm import remote

INSIDE = "tests/vm/kubelet"


@pytest.fixture(scope="module")
def node(guest: Guest) -> Guest:
    """The guest as a Kubernetes node; it stays one until the boot ends."""
    said = guest_node.provision(guest)
    print(said)
    return guest


@pytest.mark.guest
@pytest.mark.slow  # on an idle machine three minutes, and two for boot and provisioning
@pytest.mark.timeout(1500)
def test_kubelet(node: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    """Classes, limits, resize, OOM, AppArmor, user namespaces, the unit, true numbers: the systemd driver."""
    remote.run(node, f"-m 'not slow' {INSIDE}", capsys, timeout_s=1200)


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_kubelet_in_other_ways(node: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    """The cgroupfs driver, static CPU and memory policies, swap, eviction, the watchdog."""
    remote.run(node, f"-m slow {INSIDE}", capsys, timeout_s=2700)
