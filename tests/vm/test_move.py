"""Tests the third task of docs/tasks.md: a node that kubeadm has joined, with containerd and runc,
becomes one of ours without a package, and goes back. Every block of the task is run in the page's
order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import containerd_node, documents, guest, guest_disk, guest_node, images
from tests.vm import newcomer
from tests.vm.conftest import Boots
from tests.vm.newcomer import NODE, READY, Newcomer

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(5400)]

JOIN = "kubeadm join CONTROL_PLANE:6443 --token TOKEN --discovery-token-ca-cert-hash HASH"
TOKEN = "kubeadm token create --print-join-command"
IMAGE = "docker.io/library/busybox:latest"
# Files that containerd and the shared plugins write while pods come and go.
OTHERS = ("/var/lib/containerd", "/var/lib/cni")
WHEELS = "/root/wheels"


@pytest.fixture(scope="module")
def node(boots: Boots, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """Provide a node with containerd and a pod, and the wheels that a person would download."""
    folder = tmp_path_factory.mktemp("move")
    with newcomer.at_a_new_machine(
        boots, tmp_path_factory.mktemp("control"), [guest_disk.containerd()]
    ) as person:
        containerd_node.install(person.guest, folder)
        person.guest.ssh(
            "ctr -n k8s.io images import --local -", stdin=images.busybox().read_bytes()
        )
        bring_wheels(person, folder)
        person.joins(JOIN, person.types_on_the_control_plane(TOKEN))
        person.until(READY, "True", "the node Ready")
        person.runs_clock()
        yield person


def bring_wheels(person: Newcomer, folder: Path) -> None:
    """Put our wheel into /root, and the wheels of its dependencies where the guest's pip finds
    them."""
    version = person.types(
        "python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'"
    ).strip()
    (folder / "wheels").mkdir()
    guest.download_wheels(folder / "wheels", version, guest.dependencies())
    for wheel in (folder / "wheels").iterdir():
        newcomer.push(person.guest, wheel, f"{WHEELS}/{wheel.name}")
    own = guest_node.wheel(folder)
    newcomer.push(person.guest, own, f"/root/{own.name}")
    person.profile += f"; export PIP_NO_INDEX=1 PIP_FIND_LINKS={WHEELS} PATH=$PATH:/opt/pyrunc/bin"


def runtime_of(person: Newcomer, name: str) -> None:
    """Wait until the cluster lists the node as Ready with the runtime `name`, containerd or
    pyrunc."""
    output = person.until(
        "kubectl get nodes -o wide", f"{name}://", f"{name} as the node's runtime"
    )
    person.until(READY, "True", "the node Ready again")
    assert re.search(rf"{NODE} .*{name}://", output)


def test_a_node_moves_from_containerd_and_back(node: Newcomer) -> None:
    before = node.left(*OTHERS)
    install, drain, export, switch, load, start, uncordon, back, release = documents.blocks(
        "tasks.md", "Move a node from containerd to pyrunc, and back"
    )
    node.types(install)
    node.types_on_the_control_plane(drain, NODE=NODE)
    node.types(export, IMAGE=IMAGE)
    output = node.types(switch)
    assert "kubelet.service.d/90-pyrunc.conf" in output
    assert IMAGE.removesuffix(":latest") in node.types(f"{load}\npyrunc-cri images --no-trunc")
    node.types(start)
    node.types_on_the_control_plane(uncordon, NODE=NODE)
    runtime_of(node, "pyrunc")
    node.rolled_out()
    first = node.clock()
    assert first.identity[0].startswith("pyrunc://")
    assert not node.types("ctr -n k8s.io containers list -q 2>/dev/null || true").strip()

    node.types_on_the_control_plane(drain, NODE=NODE)
    node.types(back)
    node.types_on_the_control_plane(release, NODE=NODE)
    runtime_of(node, "containerd")
    node.rolled_out()
    status = node.pod()["status"]["containerStatuses"][0]
    assert status["containerID"].startswith("containerd://")
    left = {line for line in node.left(*OTHERS) - before if not is_of_containerds_pods(line)}
    assert not left


def is_of_containerds_pods(line: str) -> bool:
    """Return whether a line is a mount, network device or process of containerd's pods. These have
    other names after the move."""
    words = ("/run/containerd/", "/run/netns/", "/var/lib/kubelet/", "veth", "cni-", "/pause")
    return any(word in line for word in words)
