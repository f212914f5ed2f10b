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


def test_a_shim_that_is_killed_takes_its_pods_with_it(server: Server) -> None:
    pods = [server.run_pod() for _ in range(3)]
    containers = [server.launch(pod) for pod in pods]
    os.kill(shim_pid(server, pods[0]), signal.SIGKILL)
    for container in containers[:2]:
        assert wait_until(lambda c=container: server.status(c).state == api.CONTAINER_EXITED, 30)  # type: ignore[misc]
        assert server.status(container).reason == "Unknown"
    assert server.status(containers[2]).state == api.CONTAINER_RUNNING
    server.remove_all()
    nothing_left(server)


def descriptors(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")
