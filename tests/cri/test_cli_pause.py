"""Tests pause and unpause: the freezer stops containers, and other verbs take paused containers
into account."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.spec import groups
from tests.cri.client_verbs import call, cli, ok
from tests.cri.server_harness import Server
from tests.support.processes import wait_until

COUNT = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.02; done"
PATIENT = "trap 'exit 5' TERM; echo up; while :; do sleep 0.02; done"


def pod(server: Server, name: str, *scripts: str, **labels: str) -> str:
    """Run a pod with a container for each script (`c0`, `c1`, …); return the pod's id."""
    sandbox = server.run_pod(server.pod_config(name, labels=labels))
    for number, script in enumerate(scripts):
        config = server.container_config(["sh", "-c", script], log_path=f"c{number}.log")
        config.metadata.name = f"c{number}"
        server.launch(sandbox, config)
    return sandbox


def frozen(server: Server, name: str) -> bool:
    """Return True if the kernel reports all processes of the container as frozen."""
    (status,) = [c for c in server.containers() if c.metadata.name == name]
    info = json.loads(
        server.runtime.ContainerStatus(
            api.ContainerStatusRequest(container_id=status.id, verbose=True)
        ).info["info"]
    )
    events = Path(
        groups.place(info["cgroupsPath"], status.id).directory, "cgroup.events"
    ).read_text()
    assert info["paused"] == ("frozen 1" in events)
    return "frozen 1" in events


def states(server: Server) -> dict[str, str]:
    return {row.split()[2]: row.split()[3] for row in ok(server, "ps", "-a").lines[1:]}


def test_pause_freezes_and_unpause_thaws(server: Server) -> None:
    pod(server, "web", COUNT, "sleep 3600")
    ok(server, "pause", "web/c0")
    assert frozen(server, "c0") and not frozen(server, "c1")
    assert states(server) == {"c0": "paused", "c1": "running"}
    assert ok(server, "ps", "--filter", "status=paused", "-o", "name").lines == ["web/c0"]
    before = ok(server, "logs", "web/c0").out
    assert "is paused" in call(server, "pause", "web/c0").error
    assert b"is paused" in cli(server, "exec", "web/c0", "true", code=1).stderr
    with pytest.raises(grpc.RpcError, match="is paused"):
        server.exec(next(c.id for c in server.containers() if c.metadata.name == "c0"), "true")
    assert ok(server, "logs", "web/c0").out == before
    ok(server, "unpause", "web/c0")
    assert not frozen(server, "c0") and states(server)["c0"] == "running"
    assert wait_until(lambda: ok(server, "logs", "web/c0").out != before, 30, 0.1)
    assert "is not paused" in call(server, "unpause", "web/c0").error


def test_a_pod_pauses_as_a_whole(server: Server) -> None:
    pod(server, "web", "sleep 3600", "sleep 3600")
    ok(server, "pause", "c1")
    ok(server, "pause", "web")
    assert frozen(server, "c0") and frozen(server, "c1")
    ok(server, "resume", "web")
    assert not frozen(server, "c0") and not frozen(server, "c1")


def test_a_restarted_server_knows_paused_containers() -> None:
    with Server() as server:
        server.load_image()
        pod(server, "web", "sleep 3600")
        ok(server, "pause", "c0")
        server.restart()
        assert states(server) == {"c0": "paused"}
        ok(server, "unpause", "c0")
        assert states(server) == {"c0": "running"}


def test_stop_sends_the_stop_signal(server: Server) -> None:
    pod(server, "web", PATIENT)
    assert wait_until(lambda: "up" in ok(server, "logs", "c0").out, 30, 0.1)
    ok(server, "pause", "c0")
    ok(server, "stop", "-t", "60", "c0")
    assert "exited (5)" in ok(server, "ps", "-a").out
    assert (
        "is not running" in call(server, "pause", "c0").error
        or "is not running" in call(server, "pause", "c0").error
    )


def test_a_paused_container_can_be_removed(server: Server) -> None:
    pod(server, "web", "sleep 3600")
    ok(server, "pause", "c0")
    ok(server, "rm", "--folder", str(server.folder / "pods"), "--force", "web")
    assert not server.pods() and not server.containers()


def test_pods_of_kubelet_need_confirmation(server: Server) -> None:
    pod(server, "node", "sleep 3600", **{"io.kubernetes.pod.uid": "some-uid"})
    assert "--force to pause it" in call(server, "pause", "c0").error
    ok(server, "pause", "--force", "c0")
    ok(server, "unpause", "c0")


def test_only_running_containers_can_be_paused(server: Server) -> None:
    sandbox = server.run_pod(server.pod_config("web"))
    server.create(sandbox, server.container_config())
    assert "c is not running" in call(server, "pause", "c").error
    assert "no such pod or container" in call(server, "pause", "nothing").error
