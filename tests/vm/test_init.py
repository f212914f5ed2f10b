"""A whole cluster on one node of ours: `kubeadm init` with its control plane, kube-proxy and CoreDNS as pods, as docs/install.md
has it, on a machine with the Debian package.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import control_plane_images, documents, guest_disk, images, kubeadm, toolchain
from tests.support.guest import Guest
from tests.support.processes import wait_until
from tests.vm import newcomer
from tests.vm.conftest import Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(5400)]

PATIENCE_S = 1200.0
# Emulated processors are ten times slower than what kubeadm and leader election expect.
CONFIGURATION: list[dict[str, Any]] = [
    {
        "kind": "InitConfiguration",
        "nodeRegistration": {"criSocket": "unix:///run/pyrunc/cri.sock", "taints": []},
        "timeouts": dict.fromkeys(
            ("controlPlaneComponentHealthCheck", "kubeletHealthCheck", "kubernetesAPICall", "tlsBootstrap"),
            "20m",
        ),
    },
    {
        "kind": "ClusterConfiguration",
        "kubernetesVersion": toolchain.KUBERNETES,
        **{
            name: {"extraArgs": [{"name": "leader-elect", "value": "false"}]}
            for name in ("controllerManager", "scheduler")
        },
    },
]
PODS = {"coredns", "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler"}


class Machine:
    """Types on the guest as its administrator."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def types(self, block: str, *, timeout_s: float = 600) -> str:
        """In /root; what it printed. Raises RuntimeError when it fails."""
        script = f"cd /root; export KUBECONFIG=/etc/kubernetes/admin.conf\nset -e\n{block}"
        done = self.guest.ssh(script, timeout_s=timeout_s)
        return (done.stdout + done.stderr).decode(errors="replace")

    def pods(self, *options: str) -> list[dict[str, Any]]:
        """Of the API server; none while it does not answer."""
        done = self.guest.ssh(
            f"KUBECONFIG=/etc/kubernetes/admin.conf kubectl get pods -o json {' '.join(options)}", check=False
        )
        return list(json.loads(done.stdout)["items"]) if done.returncode == 0 else []

    def until_ready(self, names: set[str], *options: str) -> None:
        """Wait until there is a pod for each of these beginnings of names, and all pods are ready."""

        def ready() -> bool:
            pods = self.pods(*options)
            found = {name for name in names for pod in pods if pod["metadata"]["name"].startswith(name)}
            return found == names and all(is_ready(pod) for pod in pods)

        if not wait_until(ready, PATIENCE_S, 10):
            shown = self.guest.ssh(
                "KUBECONFIG=/etc/kubernetes/admin.conf kubectl get pods,events -A; pyrunc-cri ps -a; for c in $(pyrunc-cri ps -a -q); do pyrunc-cri logs --tail 5 $c; done;"
                " journalctl --no-pager -o cat -n 60 -u kubelet -u pyrunc-cri",
                check=False,
            )
            raise AssertionError(
                f"not ready within {PATIENCE_S:.0f} s: {sorted(names)}\n{shown.stdout.decode()}"
            )


def is_ready(pod: dict[str, Any]) -> bool:
    """Its condition."""
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"


def restarts(pods: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Pod -> id and restarts of its container."""
    return {
        pod["metadata"]["name"]: (status["containerID"], int(status["restartCount"]))
        for pod in pods
        for status in pod["status"]["containerStatuses"]
    }


@pytest.fixture(scope="module")
def machine(boots: Boots, debs: tuple[Path, Path]) -> Iterator[Machine]:
    """A guest just booted with Kubernetes' packages, our package installed, and the images loaded that its registry would have."""
    boots.stop()
    disk = guest_disk.of_files("control-plane", {"images.tar": control_plane_images.archive()})
    try:
        guest = boots.guest("trixie", [guest_disk.kubernetes(), guest_disk.kubeadm(), disk])
        kubeadm.install_packages(guest)
        guest.ssh(newcomer.ANSWERS)
        newcomer.push(guest, debs[0], "/root/pyrunc_own.deb")
        newcomer.push(guest, images.busybox(), "/root/busybox.tar")
        made = Machine(guest)
        made.types(documents.blocks("tasks.md", "Join a node to a cluster")[0])
        made.types(
            "mkdir -p /mnt/images; mount -o ro /dev/disk/by-label/control-plane /mnt/images; pyrunc-cri load /mnt/images/images.tar; pyrunc-cri load busybox.tar",
            timeout_s=1800,
        )
        yield made
    finally:
        boots.stop()


@pytest.fixture(scope="module")
def cluster(machine: Machine) -> Machine:
    """After `kubeadm init`."""
    text = "---\n".join(
        json.dumps({"apiVersion": "kubeadm.k8s.io/v1beta4", **part}) + "\n" for part in CONFIGURATION
    )
    (init,) = documents.blocks("install.md", "kubeadm init")
    assert "kubeadm init" in init
    machine.types(f"cat >kubeadm.yaml <<'E'\n{text}E")
    said = machine.types(init, timeout_s=2700)
    assert "Your Kubernetes control-plane has initialized successfully!" in said, said
    return machine


def test_control_plane_proxy_and_name_server_are_ready(cluster: Machine) -> None:
    cluster.until_ready(PODS, "-n", "kube-system")
    assert "pyrunc://" in cluster.types("kubectl get nodes -o wide")
    assert len(cluster.types("pyrunc-cri ps -q").split()) == len(cluster.pods("-n", "kube-system"))


def test_a_pod_finds_a_service_by_its_name(cluster: Machine) -> None:
    """By CoreDNS behind its service's address, which kube-proxy made."""
    cluster.types("kubectl run asks --image=busybox --image-pull-policy=Never -- sleep 100000")
    cluster.until_ready({"asks"})
    said = cluster.types("kubectl exec asks -- nslookup kubernetes.default.svc.cluster.local")
    assert "10.96.0.1" in said, said


def test_the_cluster_outlives_a_killed_server(cluster: Machine) -> None:
    before = restarts(cluster.pods("-A"))
    cluster.types("systemctl kill -s KILL pyrunc-cri")
    assert wait_until(
        lambda: cluster.guest.ssh("pyrunc-cri ps -q", check=False).returncode == 0, PATIENCE_S, 2
    )
    time.sleep(30)  # kubelet looks at all pods every few seconds, slowed down by emulation
    cluster.until_ready(PODS, "-n", "kube-system")
    assert restarts(cluster.pods("-A")) == before


def test_reset_removes_all_pods(cluster: Machine) -> None:
    cluster.types(documents.blocks("install.md", "Leaving")[1].splitlines()[0], timeout_s=1200)
    assert cluster.types("pyrunc-cri pods -q").split() == []
    assert cluster.types("pyrunc-cri ps -a -q").split() == []
