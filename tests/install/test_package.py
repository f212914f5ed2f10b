"""Tests a machine's life with the Debian package: install, upgrade, downgrade, purge.

The machine is a chroot without systemd, so the server is started and ended by hand where its unit
would do that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cri_server.images.archives import build
from tests.install.server import Server
from tests.support import chroot, documents, images, package
from tests.support.debian import suite
from tests.support.groups import own_group
from tests.support.processes import wait_until
from tests.support.tree import listing

PROJECT = Path(__file__).parents[2]
RECORDS_OF_DPKG = ("var/lib/dpkg", "var/lib/apt", "var/cache", "var/log", "etc/ld.so.cache")
EARLIER, LATER = "0.0.1-1", "99.0-1"
EXAMPLE = "/usr/share/doc/pyrunc/examples/10-pyrunc.conflist"
CONFIG = """
[cgroup]
driver = "cgroupfs"
missing_controllers = "warn"
default_parent = "/{group}"
"""
POD = {
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "clock"},
    "spec": {"containers": [{
        "name": "main", "image": build.BUSYBOX_NAME, "imagePullPolicy": "Never",
        "command": ["sh", "-c", "n=0; while true; do n=$((n+1)); echo $n; sleep 0.2; done"],
    }]},
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[Path]:
    """Provide a cgroup for the pods of the chroot, which shares the machine's cgroups."""
    with own_group("package") as path:
        yield path


def numbers(machine: chroot.Machine) -> list[int]:
    """Return the numbers in the pod's log so far."""
    return [int(line) for line in machine.run("pyrunc-cri logs clock").stdout.split()]


def start_time(machine: chroot.Machine) -> str:
    """Return the start time of the container's process 1 in clock ticks (proc(5), field 22)."""
    return machine.run("pyrunc-cri exec clock cat /proc/1/stat").stdout.split()[21]


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deb(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package, built for the Debian `release`."""
    return (
        package.build()
        if release == suite()
        else chroot.build_package(release, tmp_path_factory.mktemp("deb"))
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, release: str, deb: Path) -> Iterator[Path]:
    """Provide the root of a clean Debian on which apt has installed the package with its
    dependencies, and purged the package again."""
    with chroot.machine(tmp_path_factory.mktemp("machine") / "clean", release) as machine:
        shutil.copy(deb, machine.root / "root/pyrunc.deb")
        machine.run("apt-get update && apt-get install -y --no-install-recommends /root/pyrunc.deb")
        machine.run(
            "pyrunc --version && pyrunc-cri --version && test -s"
            " /usr/lib/pyrunc/pyrunc/native/pyrunc-snapshot"
        )
        machine.run("apt-get purge -y pyrunc")
        yield machine.root


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_purge_leaves_nothing(installed: Path) -> None:
    before = listing(installed, RECORDS_OF_DPKG)
    assert [path for path in before if "pyrunc" in path] == ["root/pyrunc.deb"]
    with chroot.entered(installed, own_network=True) as machine:
        machine.run("apt-get install -y --no-install-recommends /root/pyrunc.deb")
        assert (installed / "opt/cni/bin/bridge").readlink() == Path("/usr/lib/pyrunc/cni/bridge")
        assert len(listing(installed)) > len(before) + 1000
        server = Server(machine)
        machine.run("pyrunc-cri pods && pyrunc features >/dev/null && pyrunc list")
        server.stop()
        machine.run("apt-get purge -y pyrunc")
        assert "pyrunc" not in machine.run("ls /run").stdout
    assert listing(installed, RECORDS_OF_DPKG) == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readmes_commands_start_the_server_where_no_systemd_runs(installed: Path) -> None:
    """While the server runs, apt can neither remove nor purge the package; afterwards a purge
    succeeds."""
    (block,) = documents.blocks("../README.md", "Without systemd")
    network, server = block.splitlines()[:2]
    assert "10-pyrunc.conflist" in network and "pyrunc-cri serve" in server
    with chroot.entered(installed, own_network=True) as machine:
        machine.run("apt-get install -y --no-install-recommends /root/pyrunc.deb")
        pid = machine.run(f"{network}\n{server}\necho $!").stdout.split()[-1]
        assert wait_until(lambda: machine.run("pyrunc-cri pods", check=False).returncode == 0, 60)
        for verb in ("remove", "purge"):
            refused = machine.run(f"apt-get {verb} -y pyrunc", check=False)
            assert (
                refused.returncode
                and "stop `pyrunc-cri serve` first" in refused.stdout + refused.stderr
            )
        machine.run(f"pyrunc-cri pods && kill {pid}")
        machine.run("rm -rf /etc/cni/net.d/* /var/log/pyrunc-cri.log")
        assert wait_until(
            lambda: machine.run("apt-get purge -y pyrunc", check=False).returncode == 0, 60
        )
    assert [path for path in ("var/lib/pyrunc", "etc/cni") if (installed / path).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pods_run_through_an_upgrade_and_a_downgrade(
    installed: Path, deb: Path, tmp_path: Path, group: Path
) -> None:
    config = CONFIG.format(group=group.name)
    for version in (EARLIER, LATER):
        shutil.copy(package.as_version(deb, version, tmp_path), installed / f"root/{version}.deb")
    shutil.copy(images.busybox(), installed / "root/busybox.tar")
    (installed / "root/pod.yaml").write_text(yaml.safe_dump(POD))
    with chroot.entered(installed, own_network=True) as machine:
        machine.run(f"apt-get install -y --no-install-recommends /root/{EARLIER}.deb")
        with open(installed / "etc/pyrunc/config.toml", "w") as file:
            file.write(config)
        machine.run(f"cp {EXAMPLE} /etc/cni/net.d/")
        server = Server(machine)
        try:
            machine.run("pyrunc-cri image load /root/busybox.tar && pyrunc-cri run /root/pod.yaml")
            started = start_time(machine)
            for version in (LATER, EARLIER):
                count = len(numbers(machine))
                machine.run(f"apt-get install -y --allow-downgrades /root/{version}.deb")
                server.stop()  # like the unit's restart after the new files are installed
                server = Server(machine)
                assert version in machine.run("pyrunc-cri --version && pyrunc --version").stdout
                assert wait_until(lambda: len(numbers(machine)) > count + 5, 30)  # noqa: B023
                counted = numbers(machine)
                assert counted == list(range(1, len(counted) + 1)), "no line is missing or repeated"
                assert start_time(machine) == started, "the container's first process still runs"
                assert (installed / "etc/pyrunc/config.toml").read_text() == config
            refused = machine.run("apt-get remove -y pyrunc", check=False)
            assert (
                refused.returncode
                and "1 pod of this boot: stop kubelet" in refused.stdout + refused.stderr
            )
            assert (
                "install ok installed"
                in machine.run("dpkg -s pyrunc && pyrunc-cri exec clock true").stdout
            )
            machine.run("pyrunc-cri rm --force clock")
        finally:
            server.stop()
        machine.run("rm -rf /etc/cni/net.d/* /var/lib/cni && apt-get purge -y pyrunc")
    assert [
        path
        for path in ("etc/pyrunc", "var/lib/pyrunc", "opt/cni", "etc/cni")
        if (installed / path).exists()
    ] == []
