"""`[shim] pods_per_shim`: pods that share a shim live, end and are found again as others do."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.cri.test_recovery import nothing_left, shim_pid
from tests.support.processes import wait_until


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(settings={"shim": {"pods_per_shim": 2}}) as started:
        started.load_image()
        yield started


def test_each_shim_has_two_pods(server: Server) -> None:
    with ThreadPoolExecutor(5) as pool:
        pods = list(pool.map(lambda _: server.run_pod(), range(5)))
    shims = Counter(shim_pid(server, pod) for pod in pods)
    assert sorted(shims.values()) == [1, 2, 2]
    containers = [server.launch(pod) for pod in pods]
    addresses = {server.pod_status(pod).network.ip for pod in pods}
    assert len(addresses) == 5
    for number, container in enumerate(containers):
        assert server.exec(container, "echo", str(number)).stdout == b"%d\n" % number
    server.remove_all()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in shims), 30)
    nothing_left(server)


def test_one_that_ends_leaves_the_other(server: Server) -> None:
    first, second = server.run_pod(), server.run_pod()
    shim = shim_pid(server, first)
    assert shim_pid(server, second) == shim
    container = server.launch(second)
    gone = server.launch(first)
    before = descriptors(shim)
    server.stop_container(gone)
    server.remove_pod(first)
    assert not (server.state / "sandboxes" / first).exists()
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert len(descriptors(shim)) < len(before)
    third = server.run_pod()
    assert shim_pid(server, third) == shim, "there is room again"
    server.stop_container(container)
    assert server.status(container).exit_code == 137
    server.remove_all()
    nothing_left(server)


def test_a_restarted_server_finds_both(server: Server) -> None:
    pods = [server.run_pod(), server.run_pod()]
    containers = [server.launch(pod) for pod in pods]
    server.remove_pod(pods[0])
    server.restart()
    assert server.status(containers[1]).state == api.CONTAINER_RUNNING
    assert shim_pid(server, server.run_pod()) == shim_pid(server, pods[1])
    server.remove_all()
    nothing_left(server)


def test_a_stopped_pod_does_not_end_the_other(server: Server) -> None:
    """Its record says which shim it had; that lives on for the other pod, through stops and restarts."""
    first, second = server.run_pod(), server.run_pod()
    container = server.launch(second)
    server.stop_pod(first)
    server.restart()
    server.stop_pod(first)
    server.remove_pod(first)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()
    nothing_left(server)


def test_the_pods_of_a_killed_shim_go_on_in_another(server: Server) -> None:
    pods = [server.run_pod() for _ in range(3)]
    containers = [server.launch(pod) for pod in pods]
    lost = shim_pid(server, pods[0])
    os.kill(lost, signal.SIGKILL)
    assert wait_until(lambda: lost not in {shim_pid(server, pod) for pod in pods}, 30)
    for pod, container in zip(pods, containers, strict=True):
        shown = f"sandbox {pod}: another shim has taken over"
        assert pod == pods[2] or wait_until(lambda text=shown: text in server.tail(1000), 30)  # type: ignore[misc]
        assert server.output(container, "echo", "here") == "here\n"
    assert max(Counter(shim_pid(server, pod) for pod in pods).values()) == 2
    server.remove_all()
    nothing_left(server)


def descriptors(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")
