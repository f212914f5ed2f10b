"""Tests `k3s server` on our server: k3s is control plane, kubelet, kube-proxy and flannel in one
program, and our server runs its pods."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.kube_k3s.machine import PLUGINS, K3sMachine
from tests.support import documents, k3s, ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SOCKET, FILES = "unix:///run/pyrunc/cri.sock", "/etc/pyrunc/config.toml.d"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[K3sMachine]:
    """Provide a machine on which the commands of docs/install.md for k3s have run."""
    with ledger.nothing_left("the cluster"):
        started = K3sMachine(Path(tmp_path_factory.mktemp("k3s")))
        try:
            configuration, reload, start = documents.blocks("install.md", "k3s")[0].partition(
                "systemctl reload pyrunc-cri\n"
            )
            assert reload and PLUGINS in configuration and SOCKET in start
            started.up(configuration.replace(FILES, f"{started.node.folder}/config.toml.d"))
            # Without systemd, the server's cgroup driver is cgroupfs.
            own = start.replace(SOCKET, f"unix://{started.node.socket}").replace(
                "driver=systemd", "driver=cgroupfs"
            )
            started.start_k3s(own)
            started.until("node is Ready", lambda: started.is_ready(started.node))
            yield started
        finally:
            started.down()


def pod(machine: K3sMachine, name: str) -> dict[str, Any]:
    return dict(json.loads(machine.kubectl("get", "pod", name, "-o", "json").stdout))


def run(machine: K3sMachine, name: str, script: str) -> dict[str, Any]:
    """Run a pod of busybox that executes `script`; return it when it is running."""
    machine.kubectl(
        "run", name, "--image=busybox", "--image-pull-policy=Never", "--", "sh", "-c", script
    )
    machine.until(f"{name} runs", lambda: pod(machine, name)["status"]["phase"] == "Running")
    return pod(machine, name)


def test_the_node_reports_our_runtime(machine: K3sMachine) -> None:
    nodes = json.loads(machine.kubectl("get", "nodes", "-o", "json").stdout)["items"]
    infos = [node["status"]["nodeInfo"] for node in nodes]
    assert [each["kubeletVersion"] for each in infos] == [k3s.VERSION]
    assert [each["containerRuntimeVersion"].partition("://")[0] for each in infos] == ["pyrunc"]


def test_a_pod_has_an_address_of_flannels_range(machine: K3sMachine) -> None:
    created = run(machine, "web", "echo hello; echo found >/tmp/page; exec httpd -f -p 80 -h /tmp")
    assert ip_address(created["status"]["podIP"]) in ip_network(machine.pod_range(machine.node))
    assert created["metadata"]["uid"] in machine.cri(
        "inspectp", machine.cri("pods", "-q", "--name", "web").strip()
    )


def test_logs_and_exec_work(machine: K3sMachine) -> None:
    # Both go through k3s' tunnel to its kubelet, and exec on to our streaming server.
    assert machine.kubectl("logs", "web").stdout == "hello\n"
    assert machine.kubectl("exec", "web", "--", "cat", "/tmp/page").stdout == "found\n"


def test_another_pod_reaches_a_pod_by_its_service(machine: K3sMachine) -> None:
    machine.kubectl("expose", "pod", "web", "--port=80")
    address = machine.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}").stdout
    run(machine, "asks", "sleep 100000")

    # Over flannel's bridge, to the address that k3s' kube-proxy has made.
    fetch = ["exec", "asks", "--", "timeout", "10", "wget", "-qO-", f"http://{address}/page"]

    def answered() -> bool:
        return machine.kubectl(*fetch, check=False).stdout == "found\n"

    machine.until(f"{address} answers", answered)


def test_pods_outlive_a_killed_server(machine: K3sMachine) -> None:
    before = {name: pod(machine, name)["status"]["containerStatuses"] for name in ("asks", "web")}
    machine.node.server.stop(signal.SIGKILL)
    machine.node.start_server()
    run(machine, "later", "sleep 100000")
    assert machine.kubectl("exec", "web", "--", "cat", "/tmp/page").stdout == "found\n"
    assert {name: pod(machine, name)["status"]["containerStatuses"] for name in before} == before


def test_deleted_pods_are_gone(machine: K3sMachine) -> None:
    later = machine.cri("pods", "-q", "--name", "later").split()
    assert len(later) == 1
    machine.kubectl("delete", "service", "web")
    machine.kubectl("delete", "pod", "web", "asks", "--now")
    machine.until("kubelet removes the pods", lambda: machine.cri("pods", "-q").split() == later)


def test_our_command_removes_the_pods_of_a_stopped_k3s(machine: K3sMachine) -> None:
    leave = documents.blocks("install.md", "k3s")[1]
    command = next(line for line in leave.splitlines() if line.startswith("pyrunc-cri "))
    machine.k3s.stop()
    machine.cri(*command.partition("#")[0].split()[1:])
    assert machine.cri("ps", "-a", "-q").split() == machine.cri("pods", "-q").split() == []
