"""Tests a Debian that becomes a node without a package, and is none again: the wheel in a virtual
environment, `install-node`, `install-node --uninstall`.

The machine is a chroot without systemd and without a compiler, so `pyrunc` is a script and the
server is started by hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.server import Server
from tests.support import chroot, guest_node
from tests.support.debian import suite
from tests.support.tree import listing

PACKAGES = ("ca-certificates", "libseccomp2", "nftables", "python3-venv")
PRESERVED = ("opt/pyrunc", "var/cache", "var/log", "root")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[chroot.Machine]:
    """Provide a machine with the wheel in /opt/pyrunc."""
    with chroot.machine(tmp_path / "machine", suite(), PACKAGES) as machine:
        wheel = guest_node.wheel(tmp_path)
        shutil.copy(wheel, machine.root / "root" / wheel.name)
        install = f"/opt/pyrunc/bin/pip install -q --disable-pip-version-check /root/{wheel.name}"
        machine.run(f"python3 -m venv /opt/pyrunc && {install}", environment=chroot.pip_settings())
        yield machine


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_install_node_works_from_a_venv_and_is_undone(
    machine: chroot.Machine, tmp_path: Path
) -> None:
    before = listing(machine.root, PRESERVED)
    output = machine.run("/opt/pyrunc/bin/pyrunc-cri install-node").stdout
    assert "systemd does not run here: start `pyrunc-cri serve` by hand" in output
    assert machine.run("/opt/pyrunc/bin/pyrunc-cri install-node").stdout == "nothing to do\n"
    machine.run("pyrunc --version && pyrunc-cri --version && pyrunc features >/dev/null")
    with chroot.entered(machine.root, own_network=True) as here:
        server = Server(here)
        here.run("pyrunc-cri pods && ls /run/pyrunc-cri")
        server.stop()
        here.run("/opt/pyrunc/bin/pyrunc-cri install-node --uninstall --purge")
    assert listing(machine.root, PRESERVED) == before
