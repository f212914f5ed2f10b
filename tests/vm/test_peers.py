"""Tests that our server restores checkpoints of other engines, in a guest with CRIU, containerd,
podman and runc."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import guest_disk, toolchain
from tests.support.guest import Guest
from tests.vm import remote
from tests.vm.conftest import RELEASE, Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def with_containerd(boots: Boots) -> Iterator[Guest]:
    """Provide a separate guest with containerd, runc and the reference plugins at the paths that
    they have on this machine."""
    boots.stop()
    there = f"/root/.cache/pyrunc/{toolchain.peer().relative_to(toolchain.cache())}"
    try:
        guest = boots.guest(RELEASE, [guest_disk.containerd()])
        guest.ssh(f"mkdir -p {there} && mount -o ro /dev/disk/by-label/containerd {there}")
        yield guest
    finally:
        boots.stop()


def test_tests_of_foreign_checkpoints_pass(
    with_containerd: Guest, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.run(with_containerd, "tests/vm/peers", capsys, timeout_s=2000)
