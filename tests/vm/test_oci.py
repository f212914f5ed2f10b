"""Tests the OCI runtime in the guest: for ordinary users, with CRIU and AppArmor, and under podman
and containerd."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import toolchain
from tests.support.guest import Guest
from tests.vm import remote

INSIDE = "tests/vm/oci"


@pytest.fixture(scope="module")
def with_containerd(guest: Guest) -> Guest:
    """Return the guest with containerd's programs in /opt/containerd."""
    programs = ["containerd", "ctr", "containerd-shim-runc-v2"]
    archive = subprocess.run(
        ["tar", "czf", "-", "-C", str(toolchain.peer() / "bin"), *programs],
        capture_output=True,
        check=True,
    ).stdout
    guest.ssh("mkdir -p /opt/containerd && tar xzf - -C /opt/containerd", stdin=archive)
    return guest


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.timeout(2100)
def test_tests_of_the_runtime_pass(guest: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    remote.run(guest, f"-m 'not slow' {INSIDE}", capsys, timeout_s=2000)


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_tests_of_engines_pass(with_containerd: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    remote.run(with_containerd, f"-m slow --timeout=600 {INSIDE}", capsys, timeout_s=3900)
