"""`pyrunc-cri timeline`: a pod's life with its steps, also when the pod is gone and the server was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.cri.server_harness import REPOSITORY, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        server.load_image()
        yield server


def run(server: Server, *words: str, code: int = 0) -> str:
    command = [
        sys.executable,
        "-m",
        "cri_server.cli.main",
        "--address",
        f"unix://{server.socket}",
        "timeline",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == code, done.stderr
    return (done.stdout or done.stderr).decode()


def calls(server: Server, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(server, *words, "--json"))
    return found


def test_a_pods_life(server: Server) -> None:
    pod = server.run_pod(server.pod_config("life"))
    container = server.launch(pod)
    server.stop_container(container)
    server.stop_pod(pod)
    server.stop_pod(pod)
    server.remove_pod(pod)
    found = calls(server, "default/life")
    names = [call["call"] for call in found]
    assert names[:3] == ["RunPodSandbox", "CreateContainer", "StartContainer"]
    assert {"StopContainer", "container ended", "RemovePodSandbox"} < set(names)
    assert names.count("StopPodSandbox") == 1, "one that found nothing to do is not remembered"
    ran = found[0]
    assert ran["pod_id"] == pod and ran["outcome"] == "OK"
    spans = {span["name"]: span for span in ran["spans"]}
    assert {"state", "shim", "network", "record"} < set(spans) and any(n.startswith("plugin ") for n in spans)
    for span in ran["spans"]:
        assert 0 <= span["offset_ms"] <= span["offset_ms"] + span["duration_ms"] <= ran["duration_ms"] + 1
    assert "execute" in {span["name"] for span in found[2]["spans"]}
    text = run(server, pod[:12])
    assert "RunPodSandbox default/life OK" in text and "█" in text and " network\n" in text
    assert "container ended default/life c exit code 137" in text


def test_a_failure_and_a_server_that_is_killed(server: Server) -> None:
    with Server(network=False) as server:
        server.load_image()
        pod = server.run_pod(server.pod_config("wrong"), host_network=True)
        container = server.create(pod, server.container_config(["/no/such/program"]))
        with pytest.raises(grpc.RpcError):
            server.start_container(container)
        (failed,) = [c for c in calls(server, "wrong") if c["call"] == "StartContainer"]
        assert failed["outcome"] != "OK" and failed["spans"][-1] == {
            **failed["spans"][-1],
            "name": "execute",
            "failed": True,
        }
        server.restart()
        assert [c["call"] for c in calls(server, "wrong")][:3] == [
            "RunPodSandbox",
            "CreateContainer",
            "StartContainer",
        ]
        assert " execute !\n" in run(server, "wrong")


def test_the_last_and_the_slowest(server: Server) -> None:
    for name in ("one", "two"):
        server.remove_pod(server.run_pod(server.pod_config(name)))
    assert [c["call"] for c in calls(server, "--last", "3")] == [
        "RemovePodSandbox",
        "RunPodSandbox",
        "RemovePodSandbox",
    ]
    slowest = [c["duration_ms"] for c in calls(server, "--slowest", "5")]
    assert len(slowest) == 5 and slowest == sorted(slowest, reverse=True)
    assert "nothing is remembered of 'nobody'" in run(server, "nobody", code=1)
