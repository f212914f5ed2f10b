"""Tests a Debian of arm64 on an emulated machine: qemu-user would run its programs on this
machine's kernel.

Emulated processors are fifty times slower: these tests take a quarter of an hour on an idle
machine, and ten minutes more to build the disk.
"""

from __future__ import annotations

import pytest

from tests.support import guest_disk
from tests.support.guest import EMULATED_ARM64, Guest
from tests.vm import remote
from tests.vm.conftest import RELEASE, Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(5400)]

# Without network, which a guest of pods has by itself, and without what another folder's programs
# would need. Not there: make builds the C programs for both processors, which takes a cross
# compiler; entries of x86's other system calls.
KERNEL = (
    "tests/kernel/container tests/kernel/program tests/kernel/seccomp --deselect"
    " tests/kernel/program/test_build.py::test_make_check_passes --deselect"
    " tests/kernel/seccomp/test_filters.py::test_filters_cover_their_architectures --deselect"
    " tests/kernel/seccomp/test_filters.py::test_a_rule_holds_for_every_listed_architecture"
)
SYSTEM = "tests/system/test_life.py"
SERVER = "tests/cri/rpc/test_start_container.py tests/cri/rpc/test_exec.py"
KUBELET = "tests/vm/standalone"
INSIDE = {"kernel": KERNEL, "system": SYSTEM, "server": SERVER, "kubelet": KUBELET}
INSTALL = (
    "/opt/venv/bin/python -m compileall -q pyrunc cri_server cni_plugins && /opt/venv/bin/python -m"
    " pyrunc.cli.entry install /opt/venv/bin"
)


@pytest.fixture(scope="module")
def arm64(boots: Boots) -> Guest:
    """Return the guest with the project installed; its `pyrunc` is compiled and starts from a
    snapshot."""
    guest = boots.guest(RELEASE, [guest_disk.kubelet_arm64()], EMULATED_ARM64)
    guest.ssh(f"cd /root/project && {INSTALL}", timeout_s=1200)
    return guest


def test_the_program_starts_from_its_snapshot(arm64: Guest) -> None:
    start = arm64.ssh(
        "file=/opt/venv/bin/pyrunc; head -c 4 $file | tail -c 3; $file --version"
    ).stdout.decode()
    assert start.startswith("ELF") and "pyrunc version" in start


def test_the_demo_runs_a_pod(arm64: Guest) -> None:
    output = arm64.ssh(
        "cd /root/project && /opt/venv/bin/python -c 'from cri_server.cli.main import main; main()'"
        " demo pod.yaml",
        timeout_s=1200,
    )
    assert "says hello" in (output.stdout + output.stderr).decode()


@pytest.mark.parametrize("what", INSIDE)
def test_tests_of_the_guest_pass(
    arm64: Guest, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.run(arm64, f"-m 'not slow' {INSIDE[what]}", capsys, timeout_s=5000)
