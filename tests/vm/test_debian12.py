"""Tests Debian 12 (Linux 6.1, systemd 252), the other machine that the Vagrantfile offers: limits,
QoS classes of kubelet's pods, and features that this kernel has in another form."""

from __future__ import annotations

import pytest

from tests.support import guest_node
from tests.support.guest import Guest
from tests.vm import image_tests, remote
from tests.vm.conftest import Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow]

# test_streamed needs mounted images.
STORE = ("unpack", "store", "hostile", "pull", "faults", "crash", "jail", "unused")


@pytest.fixture(scope="module")
def guest(boots: Boots) -> Guest:
    return boots.guest("bookworm")


@pytest.fixture(scope="module")
def node(guest: Guest) -> Guest:
    print(guest_node.provision(guest))
    return guest


@pytest.mark.timeout(1200)
def test_limits_are_enforced(guest: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    remote.run(guest, "tests/vm/inside", capsys, ledger="machine", timeout_s=900)


@pytest.mark.timeout(1800)
def test_pods_survive_kills_without_pidfd_info_exit(
    guest: Guest, capsys: pytest.CaptureFixture[str]
) -> None:
    # Linux 6.1 does not report how a reaped process ended (PIDFD_INFO_EXIT).
    remote.run(
        guest,
        "tests/cri/test_keeper.py -k 'exit_code or all_killed or sessions'",
        capsys,
        timeout_s=1500,
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "what",
    ["-m 'not slow' tests/vm/kubelet/test_placement.py", "tests/vm/linux_6_1/test_pods.py"],
    ids=["placement", "pods"],
)
def test_tests_with_kubelet_pass(
    node: Guest, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.run(node, what, capsys, timeout_s=900)


@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    "what",
    ["tests/vm/linux_6_1/test_images.py", f"{image_tests.files(*STORE)} -k 'not erofs'"],
    ids=["kinds", "unpacked"],
)
def test_tests_of_images_pass(guest: Guest, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    image_tests.run(guest, what, capsys)
