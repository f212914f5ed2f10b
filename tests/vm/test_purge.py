"""Tests the Debian package under systemd on a machine without Kubernetes: after install, a pod and
purge, everything is as before.

The whole machine is compared, not only objects with our name: files, units, mounts, network
devices, nftables, cgroups, processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import documents, images
from tests.support.guest import Guest
from tests.support.processes import wait_until
from tests.vm import newcomer
from tests.vm.conftest import RELEASE, Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(2400)]

PATIENCE_S = 120.0
POD = Path(__file__).parents[2] / "pod.yaml"
# Records and caches of apt and the journal, files of the test, and systemd's own state, whose units
# are listed by name.
NOT_COUNTED = (
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/cache",
    "/var/log/journal",
    "/var/log/apt",
    "/root",
    "/etc/apt/apt.conf.d/99yes",
    "/var/lib/systemd/timers",
    "/run/systemd",
    "/run/udev",
    "/run/log",
    "/run/user",
    "/run/lock",
    "/run/mount",
)
# Written by others at any time.
NOT_COUNTED_FILES = (
    "/var/log/dpkg.log",
    "/var/log/alternatives.log",
    "/var/log/lastlog",
    "/var/log/wtmp",
    "/var/log/wtmp.db",
    "/var/lib/systemd/random-seed",
    "/var/lib/systemd/linger",
    "/etc/ld.so.cache",
)
FACTS = "-type d -printf '%p/ %M %U:%G\\n' -o -printf '%p %M %U:%G %s %l\\n'"
QUESTIONS = {
    "unit files": "systemctl list-unit-files --plain --no-legend --no-pager | awk '{print $1, $2}'",
    "units": (
        "systemctl list-units --state=active,failed --plain --no-legend --no-pager | awk '{print"
        " $1, $4}'"
    ),
    "mounts": "findmnt -rn -o TARGET,FSTYPE",
    "links": "ls /sys/class/net",
    # routes that routers advertise change
    "routes": "(ip route; ip -6 route) | sed -E 's/ (nhid [0-9]+|expires [0-9]+sec)//g'",
    "nftables": "nft list ruleset",
    "iptables": "iptables-save | grep -v '^#'; true",
    "cgroups": "find /sys/fs/cgroup -type d",
    "network namespaces": "ls /run/netns 2>/dev/null; true",
    "processes": "ps -e -o args= | grep -E 'pyrunc|pause|launcher' | grep -v grep; true",
}
# Units and cgroups of logins, of services that systemd starts on demand, and of podman's DHCP
# proxy, which ends when it is idle.
COME_AND_GO = (
    "session-",
    "user@",
    "user-",
    "user.slice",
    "run-user-",
    "systemd-",
    "apt-",
    "dpkg-db-backup",
    "init.scope",
    "dev-",
    "sys-devices-",
    "sys-module-",
    "polkit",
    "packagekit",
    "man-db",
    "netavark-dhcp-proxy",
)


@pytest.fixture(scope="module")
def machine(boots: Boots) -> Iterator[Guest]:
    """Provide a guest just booted, which only these tests use."""
    boots.stop()
    try:
        yield boots.guest(RELEASE)
    finally:
        boots.stop()


def types(machine: Guest, block: str) -> str:
    done = machine.ssh(f"cd /root; set -e\n{block}")
    return (done.stdout + done.stderr).decode(errors="replace")


def everything(machine: Guest) -> set[str]:
    """Return a line for each file, unit, mount, process and so on of the machine."""
    skipped = " -o ".join(f"-path {path}" for path in (*NOT_COUNTED, *NOT_COUNTED_FILES))
    # The contents of configuration files count: a changed file of another package has the same
    # name.
    questions = {
        "files": f"find / /run /dev/shm /tmp -xdev \\( {skipped} \\) -prune -o {FACTS}",
        "configuration": (
            "find /etc -xdev -type f ! -name ld.so.cache ! -name 99yes -exec sha256sum {} +"
        ),
        **QUESTIONS,
    }
    paths = set()
    for what, question in questions.items():
        for line in machine.ssh(question).stdout.decode(errors="replace").splitlines():
            if not (what in ("units", "cgroups") and any(part in line for part in COME_AND_GO)):
                paths.add(f"{what}: {line.strip()}")
    return paths


def test_purge_leaves_nothing_of_package_and_pods(machine: Guest, debs: tuple[Path, Path]) -> None:
    newcomer.push(machine, debs[0], "/root/pyrunc_own.deb")
    newcomer.push(machine, images.busybox(), "/root/busybox.tar")
    newcomer.push(machine, POD, "/root/pod.yaml")
    machine.ssh(newcomer.ANSWERS)
    before = everything(machine)
    assert not [line for line in before if "pyrunc" in line]

    types(
        machine,
        "apt install ./pyrunc_*.deb && cp /usr/share/doc/pyrunc/examples/10-pyrunc.conflist"
        " /etc/cni/net.d/",
    )
    types(machine, "pyrunc-cri load busybox.tar && pyrunc-cri run pod.yaml")
    assert "busybox says hello" in types(machine, "pyrunc-cri logs busybox")
    during = everything(machine)
    kinds = {line.partition(":")[0] for line in during - before}
    assert kinds >= {
        "files",
        "configuration",
        "unit files",
        "units",
        "links",
        "cgroups",
        "processes",
    }, kinds

    with pytest.raises(RuntimeError, match="1 pod of this boot: stop kubelet"):
        types(machine, "apt purge pyrunc")
    types(machine, "pyrunc-cri rm --force busybox")
    leave = documents.blocks("install.md", "Leaving")[1].splitlines()
    types(machine, "\n".join(line for line in leave if not line.startswith("kubeadm")))
    changed: list[set[str]] = [set()]

    def is_as_before() -> bool:
        changed[0] = everything(machine) ^ before
        return not changed[0]

    assert wait_until(is_as_before, PATIENCE_S, 5), "\n".join(sorted(changed[0]))


def test_the_package_can_be_installed_again(machine: Guest) -> None:
    types(machine, "apt install ./pyrunc_*.deb")
    assert "active" in types(machine, "systemctl is-active pyrunc-cri; pyrunc-cri pods")
