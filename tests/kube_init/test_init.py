"""Tests a whole cluster on one node of ours, made by `kubeadm init`: its control plane, kube-proxy
and CoreDNS run as our pods."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube_init.machine import PATIENCE_S, KubeadmMachine
from tests.support import documents, ledger
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PODS = {
    "coredns",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeadmMachine]:
    """Provide a machine on which the `kubeadm init` of docs/install.md has run."""
    with ledger.nothing_left("the cluster"):
        started = KubeadmMachine(Path(tmp_path_factory.mktemp("init")))
        try:
            started.up()
            (command,) = documents.blocks("install.md", "kubeadm init")
            output = started.init(command.replace("kubeadm.yaml", str(started.kubeadm_file())))
            assert "Your Kubernetes control-plane has initialized successfully!" in output, output
            yield started
        finally:
            started.down()


def restarts(pods: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Return a dict: name of a pod -> (id, number of restarts) of its container."""
    return {
        pod["metadata"]["name"]: (status["containerID"], int(status["restartCount"]))
        for pod in pods
        for status in pod["status"]["containerStatuses"]
    }


def test_control_plane_proxy_and_name_server_are_ready(machine: KubeadmMachine) -> None:
    machine.until_ready(PODS, "-n", "kube-system")
    assert "pyrunc://" in machine.kubectl("get", "nodes", "-o", "wide").stdout
    assert len(machine.cri("ps", "-q").split()) == len(machine.pods("-n", "kube-system"))


def test_a_pod_finds_a_service_by_its_name(machine: KubeadmMachine) -> None:
    machine.kubectl(
        "run", "asks", "--image=busybox", "--image-pull-policy=Never", "--", "sleep", "100000"
    )
    machine.until_ready({"asks"})
    # CoreDNS answers at the address of its Service, which kube-proxy translates.
    output = machine.kubectl(
        "exec", "asks", "--", "nslookup", "kubernetes.default.svc.cluster.local"
    ).stdout
    assert "10.96.0.1" in output, output


def test_the_cluster_outlives_a_killed_server(machine: KubeadmMachine) -> None:
    """No pod is restarted, not even the API server, which is itself a pod of the killed server."""
    before = restarts(machine.pods("-A"))
    machine.node.server.stop(signal.SIGKILL)
    machine.kubectl("delete", "pod", "asks", "--wait=false")
    machine.node.start_server()
    assert wait_until(
        lambda: "asks" not in machine.kubectl("get", "pods", "-o", "name").stdout, PATIENCE_S, 1
    )
    machine.until_ready(PODS, "-n", "kube-system")
    del before["asks"]
    assert restarts(machine.pods("-A")) == before


def test_reset_removes_all_pods(machine: KubeadmMachine) -> None:
    reset = documents.blocks("install.md", "Leaving")[1].splitlines()[0]
    assert "kubeadm reset" in reset
    machine.node.kubelet.stop()
    machine.types(reset.replace("unix:///run/pyrunc/cri.sock", f"unix://{machine.node.socket}"))
    assert machine.cri("ps", "-a", "-q").split() == machine.cri("pods", "-q").split() == []
