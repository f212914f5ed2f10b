"""Tests a pod of a kubelet in standalone mode, without control plane: it runs, its log and exec
work, and it ends."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.standalone.node import MANIFESTS, Json, Node

MANIFEST: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "static", "namespace": "default"},
    "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "c",
                "image": "docker.io/library/busybox:latest",
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", 'echo "$(uname -m) says hello"; exec sleep 3600'],
                "resources": {"limits": {"memory": "64Mi", "cpu": "500m"}},
            }
        ],
    },
}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    machine = Node()
    try:
        machine.start()
        yield machine
    finally:
        machine.stop()


@pytest.fixture(scope="module")
def static(node: Node) -> Json:
    """Start the static pod and return it when it is running."""
    (MANIFESTS / "static.json").write_text(json.dumps(MANIFEST))

    def running() -> Json | None:
        pod = node.pod("static")
        statuses = pod["status"].get("containerStatuses", []) if pod else []
        return pod if any("running" in status["state"] for status in statuses) else None

    running_pod: Json = node.until(running, "running container")
    return running_pod


def test_the_pod_runs_in_the_cgroup_of_its_class(static: Json) -> None:
    assert static["status"]["phase"] == "Running" and static["status"]["podIP"].startswith(
        "10.244.0."
    )
    uid = static["metadata"]["uid"].replace("-", "_")
    # Its limits equal its requests, so it is Guaranteed, and such pods are directly below
    # kubepods.slice.
    group = Path(f"/sys/fs/cgroup/kubepods.slice/kubepods-pod{uid}.slice")
    assert (group / "memory.max").read_text().strip() == str(64 << 20)
    assert (group / "cpu.max").read_text().split() == ["50000", "100000"]


def test_kubelet_serves_the_log_of_a_static_pod(node: Node, static: Json) -> None:
    log = node.until(lambda: node.get("/containerLogs/default/static-guest/c"), "line in the log")
    assert log.decode() == f"{platform.machine()} says hello\n"


def test_an_exec_runs_a_command_in_a_static_pod(node: Node, static: Json) -> None:
    output, status = node.execute("static", "c", "sh", "-c", "uname -m; cat /proc/1/comm")
    assert (output, status["status"]) == (f"{platform.machine()}\nsleep\n", "Success")


def test_an_exec_reports_the_exit_code(node: Node, static: Json) -> None:
    _, status = node.execute("static", "c", "sh", "-c", "exit 7")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]


def test_a_static_pod_ends_when_its_manifest_is_removed(node: Node, static: Json) -> None:
    (MANIFESTS / "static.json").unlink()
    uid = static["metadata"]["uid"].replace("-", "_")
    group = Path(f"/sys/fs/cgroup/kubepods.slice/kubepods-pod{uid}.slice")
    node.until(lambda: node.pod("static") is None and not group.exists(), "end of the pod")
