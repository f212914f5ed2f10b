"""Tests what newcomers try first: apply, a Deployment, run, describe node, and requests to a
pod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.kube.pods import Kube

PROJECT = Path(__file__).parents[2]


def test_kubectl_apply_starts_a_pod(kube: Kube) -> None:
    kube("apply", "-f", str(PROJECT / "pod.yaml"))
    pod = kube.ready("busybox")
    assert pod["status"]["phase"] == "Running"
    assert pod["status"]["podIP"].startswith("10.244.0.")
    assert kube("exec", "busybox", "--", "cat", "/proc/1/cmdline").stdout == "sleep\x003600\x00"


def test_a_deployment_of_nginx_serves_from_each_replica(kube: Kube) -> None:
    kube("create", "deploy", "nginx", "--image=nginx", "--replicas=3")
    kube("rollout", "status", "deployment/nginx", "--timeout=90s")
    pods = json.loads(kube("get", "pods", "-l", "app=nginx", "-o", "json").stdout)["items"]
    addresses = {p["status"]["podIP"] for p in pods}
    assert len(addresses) == 3
    kube("run", "client", "--image=busybox", "--restart=Never", "--", "sleep", "3600")
    kube.ready("client")
    for address in addresses:
        ask = ("exec", "client", "--", "wget", "-qO-", f"http://{address}/")
        kube.until(
            lambda ask=ask: "Welcome to nginx" in kube(*ask, check=False).stdout, "nginx's answer"
        )  # type: ignore[misc]


def test_kubectl_run_starts_nginx(kube: Kube) -> None:
    kube("run", "nginx", "--image", "nginx")
    pod = kube.ready("nginx")
    status = pod["status"]["containerStatuses"][0]
    assert status["image"] == "docker.io/library/nginx:latest"
    assert status["imageID"].startswith("docker.io/library/nginx@sha256:")
    assert status["containerID"].startswith("pyrunc://")


def test_the_node_describes_the_runtime(kube: Kube) -> None:
    node = json.loads(kube("get", "node", "node1", "-o", "json").stdout)
    assert node["status"]["nodeInfo"]["containerRuntimeVersion"].startswith("pyrunc://")
    assert {"name": ""}.items() <= node["status"]["runtimeHandlers"][0].items() or any(
        not handler.get("name") for handler in node["status"]["runtimeHandlers"]
    )


def test_a_pod_and_its_node_reach_each_other(kube: Kube) -> None:
    kube("run", "nginx", "--image", "nginx")
    address = kube.ready("nginx")["status"]["podIP"]
    inside = kube.cluster.node.inside("busybox", "wget", "-qO-", f"http://{address}/")

    def answer() -> bool:  # a container without a probe is Ready before its program listens
        return "Welcome to nginx" in subprocess.run(inside, capture_output=True, text=True).stdout

    kube.until(answer, "nginx's answer")
