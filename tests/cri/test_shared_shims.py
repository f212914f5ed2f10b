"""Tests the node's shims, which many pods share: pods live and end in them, and a restarted server
finds them there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, server_fixture
from tests.cri.test_recovery import nothing_left, shim_pid
from tests.support.processes import wait_until

server = server_fixture("function", settings={"shims": {"count": 2}})


def shims(server: Server) -> set[int]:
    """Return the pids of the living shims."""
    return {
        json.loads(record.read_text())["pid"]
        for record in (server.state / "shims").glob("*/shim.json")
    }


def test_pods_are_spread_over_the_shims(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        pods = list(pool.map(lambda _: server.run_pod(), range(6)))
    used = Counter(shim_pid(server, pod) for pod in pods)
    assert used.keys() == shims(server) and sorted(used.values()) == [3, 3]
    containers = [server.launch(pod) for pod in pods]
    addresses = {server.pod_status(pod).network.ip for pod in pods}
    assert len(addresses) == 6
    for number, container in enumerate(containers):
        assert server.exec(container, "echo", str(number)).stdout == b"%d\n" % number
    server.remove_all()
    nothing_left(server)
    assert shims(server) == used.keys(), "the shims wait for the next pods"


def test_the_end_of_a_pod_leaves_other_pods_of_its_shim(server: Server) -> None:
    first, _, third = (server.run_pod() for _ in range(3))
    shim = shim_pid(server, first)
    assert shim_pid(server, third) == shim
    container = server.launch(third)
    gone = server.launch(first)
    before = descriptors(shim)
    server.stop_container(gone)
    server.remove_pod(first)
    assert not (server.state / "sandboxes" / first).exists()
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert len(descriptors(shim)) < len(before)
    server.stop_container(container)
    assert server.status(container).exit_code == 137
    server.remove_all()
    nothing_left(server)


def test_a_shim_has_as_many_descriptors_after_many_pods_as_after_one_pod(server: Server) -> None:
    def live() -> int:
        pod = server.run_pod()
        server.launch(pod)
        shim = shim_pid(server, pod)
        server.remove_pod(pod)
        time.sleep(0.3)  # the shim has made the next network namespace
        return shim

    shim = live()
    before = len(descriptors(shim))
    for _ in range(5):
        assert live() == shim
    assert wait_until(lambda: len(descriptors(shim)) <= before, 30)


def test_a_restarted_server_uses_the_same_shims(server: Server) -> None:
    pods = [server.run_pod(), server.run_pod()]
    containers = [server.launch(pod) for pod in pods]
    before = shims(server)
    server.remove_pod(pods[0])
    server.restart()
    assert server.status(containers[1]).state == api.CONTAINER_RUNNING
    assert shim_pid(server, pods[1]) in before and shim_pid(server, server.run_pod()) in shims(
        server
    )
    assert len(shims(server)) == 2
    server.remove_all()
    nothing_left(server)


def test_a_stopped_pod_does_not_end_the_other(server: Server) -> None:
    """Neither stops of a pod nor restarts of the server end a shim that other pods use."""
    first, _, third = (server.run_pod() for _ in range(3))
    container = server.launch(third)
    server.stop_pod(first)
    server.restart()
    server.stop_pod(first)
    server.remove_pod(first)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()
    nothing_left(server)


def test_the_pods_of_a_killed_shim_go_on_in_the_others(server: Server) -> None:
    pods = [server.run_pod() for _ in range(4)]
    containers = [server.launch(pod) for pod in pods]
    lost = shim_pid(server, pods[0])
    mine = [pod for pod in pods if shim_pid(server, pod) == lost]
    os.kill(lost, signal.SIGKILL)
    assert wait_until(lambda: lost not in {shim_pid(server, pod) for pod in pods}, 30)
    for pod, container in zip(pods, containers, strict=True):
        line = f"sandbox {pod}: another shim has taken over"
        assert pod not in mine or wait_until(lambda text=line: text in server.tail(1000), 30)  # type: ignore[misc]
        assert server.output(container, "echo", "here") == "here\n"
    assert wait_until(lambda: len(shims(server)) == 2, 30), "the shim is replaced"
    assert lost not in shims(server)
    server.remove_all()
    nothing_left(server)


def test_pods_go_to_the_shims_that_answer(server: Server) -> None:
    """While one of two shims is stopped, the other one gets the pods. When the stopped shim
    continues, it refuses the late requests for these pods."""
    stopped, other = shims(server)
    os.kill(stopped, signal.SIGSTOP)
    try:
        pods = [server.run_pod() for _ in range(2)]
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert {shim_pid(server, pod) for pod in pods} == {other}
    assert wait_until(lambda: stopped in {shim_pid(server, server.run_pod()) for _ in range(2)}, 30)
    assert {shim_pid(server, pod) for pod in pods} == {other}
    server.remove_all()
    nothing_left(server)


def test_shims_without_pods_end_with_the_server(server: Server) -> None:
    pod = server.run_pod()
    shim = shim_pid(server, pod)
    all_of_them = shims(server)
    server.stop()
    assert wait_until(lambda: [p for p in all_of_them if Path(f"/proc/{p}").exists()] == [shim], 30)
    server.start()
    server.remove_all()
    nothing_left(server)


def descriptors(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")
