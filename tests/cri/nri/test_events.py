"""Tests the events of pods and containers that NRI plugins get, their order, and plugins that fail,
refuse or do not answer.

The expected events are those of NRI's pod and container life cycles, which critest's NRI specs
check, too.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as cri
from cri_server.api import nri_pb2 as api
from tests.cri.nri.conftest import REQUEST_TIMEOUT_S
from tests.cri.server_harness import Server, code_of, message_of
from tests.cri.test_takeover import lose_shim
from tests.support.nri import Handler, Refused, TestPlugin


class Held:
    """A handler that records its request and blocks until the `with` block ends."""

    def __init__(self) -> None:
        self.reached, self._released = threading.Event(), threading.Event()
        self.request: Any = None

    def __call__(self, request: Any) -> None:
        self.request = request
        self.reached.set()
        assert self._released.wait(60)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()


def in_thread(call: Callable[[], object]) -> Callable[[], Any]:
    """Start `call` in a thread; the returned function waits for its result or raises its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def finish() -> Any:
        thread.join(90)
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return finish


def once(message: str) -> Handler:
    """Return a handler that refuses its first request with `message`."""
    left = [message]

    def refuse(request: Any) -> None:
        if left:
            raise Refused(left.pop())

    return refuse


@pytest.mark.requirement("13.21")
def test_a_plugin_gets_the_events_of_a_pod_and_its_container(
    server: Server, nri_socket: Path
) -> None:
    with TestPlugin(nri_socket) as plugin:
        assert plugin.config is not None and plugin.config.runtime_name == "pyrunc"
        assert plugin.config.request_timeout == REQUEST_TIMEOUT_S * 1000
        config = server.pod_config(labels={"l": "1"}, annotations={"a": "2"})
        pod = server.run_pod(config)
        container = server.launch(pod, server.container_config(labels={"m": "3"}))
        server.stop_container(container)
        server.remove_container(container)
        server.stop_pod(pod)
        server.remove_pod(pod)
        assert plugin.methods(pod) == ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"]
        for method, networks in (
            ("RunPodSandbox", 1),
            ("StopPodSandbox", 1),
            ("RemovePodSandbox", 0),
        ):
            notified = plugin.wait_for(method, pod).pod
            assert [n.type for n in notified.linux.namespaces] == ["network"] * networks, method
            assert list(notified.ips) == list(plugin.wait_for("RunPodSandbox", pod).pod.ips)
        assert plugin.methods(container) == [
            "CreateContainer",
            "ValidateContainerAdjustment",
            "PostCreateContainer",
            "StartContainer",
            "PostStartContainer",
            "StopContainer",
            "RemoveContainer",
        ]
        seen = plugin.wait_for("RunPodSandbox").pod
        assert (seen.id, seen.name, seen.uid, seen.namespace) == (
            pod,
            config.metadata.name,
            config.metadata.uid,
            "default",
        )
        assert dict(seen.labels) == {"l": "1"} and dict(seen.annotations) == {"a": "2"}
        assert seen.pid and seen.ips and seen.linux.namespaces[0].path == f"{server.names}/{pod}"
        created = plugin.wait_for("CreateContainer").container
        assert (created.name, created.pod_sandbox_id, list(created.args)) == (
            "c",
            pod,
            ["sleep", "3600"],
        )
        assert created.labels["m"] == "3" and "FROM_IMAGE=yes" in created.env and created.mounts
        assert plugin.wait_for("PostStartContainer").container.state == api.CONTAINER_RUNNING
        ended = plugin.wait_for("StopContainer").container
        assert (ended.state, ended.exit_code) == (api.CONTAINER_STOPPED, 137)


def test_plugins_are_notified_of_an_exit_without_a_call(server: Server, nri_socket: Path) -> None:
    with TestPlugin(nri_socket) as plugin:
        container = server.launch(server.run_pod(), server.container_config(("sh", "-c", "exit 3")))
        ended = plugin.wait_for("StopContainer", container).container
        assert (ended.exit_code, ended.status_reason) == (3, "Error")
        server.remove_container(container)
        assert plugin.methods(container).count("StopContainer") == 1
        assert plugin.methods(container)[-1] == "RemoveContainer"


@pytest.mark.requirement("2.2")
def test_a_pod_is_not_listed_before_the_last_plugin_agrees(
    server: Server, nri_socket: Path
) -> None:
    order: list[str] = []
    with (
        Held() as held,
        TestPlugin(nri_socket, index="11", handlers={"RunPodSandbox": held}),
        TestPlugin(
            nri_socket, index="10", handlers={"RunPodSandbox": lambda _: order.append("10")}
        ),
    ):
        finish = in_thread(server.run_pod)
        assert held.reached.wait(60) and order == ["10"]
        identifier = held.request.pod.id
        assert not server.pods()
        assert code_of(lambda: server.pod_status(identifier)) is grpc.StatusCode.NOT_FOUND
        request = cri.CreateContainerRequest(
            pod_sandbox_id=identifier, config=server.container_config()
        )
        with pytest.raises(grpc.RpcError):
            server.runtime.CreateContainer(request, timeout=30)
        held.__exit__()
        assert finish() == identifier
        assert server.pod_status(identifier).state == cri.SANDBOX_READY


def test_a_pod_that_a_plugin_refuses_leaves_nothing(server: Server, nri_socket: Path) -> None:
    with TestPlugin(nri_socket, handlers={"RunPodSandbox": once("not this one")}) as plugin:
        config = server.pod_config()
        message = message_of(lambda: server.run_pod(config))
        assert message == "NRI plugin 00-test: RunPodSandbox: not this one"
        refused = plugin.wait_for("RunPodSandbox").pod.id
        assert plugin.methods(refused) == ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"]
        assert not server.pods() and not list((server.state / "sandboxes").iterdir())
        assert server.pod_status(server.run_pod(config)).state == cri.SANDBOX_READY


def test_a_container_that_a_plugin_refuses_leaves_nothing(server: Server, nri_socket: Path) -> None:
    pod = server.run_pod()
    with TestPlugin(nri_socket, handlers={"CreateContainer": once("no")}) as plugin:
        with pytest.raises(grpc.RpcError, match="NRI plugin 00-test: CreateContainer: no"):
            server.create(pod)
        refused = plugin.wait_for("CreateContainer").container.id
        assert plugin.methods(refused) == ["CreateContainer", "StopContainer", "RemoveContainer"]
        assert not server.containers() and not list((server.state / "containers").iterdir())
        container = server.launch(pod)
        server.stop_container(container)


def test_a_plugin_may_refuse_the_start_of_a_container(server: Server, nri_socket: Path) -> None:
    with TestPlugin(nri_socket, handlers={"StartContainer": once("not yet")}):
        container = server.create(server.run_pod())
        with pytest.raises(grpc.RpcError, match="StartContainer: not yet"):
            server.start_container(container)
        server.start_container(container)
        assert server.status(container).state == cri.CONTAINER_RUNNING


def test_a_container_is_started_by_the_shim_that_takes_over_meanwhile(
    server: Server, nri_socket: Path
) -> None:
    pod = server.run_pod()
    container = server.create(pod)

    def lose(request: Any) -> None:
        lose_shim(server, pod)

    with TestPlugin(nri_socket, handlers={"StartContainer": lose}):
        server.start_container(container)
    assert server.status(container).state == cri.CONTAINER_RUNNING
    assert server.output(container, "echo", "here") == "here\n"
    server.stop_container(container)
    assert server.status(container).exit_code == 137


@pytest.mark.requirement("13.13")
def test_containers_end_before_the_pods_stop_which_is_sent_once(
    server: Server, nri_socket: Path
) -> None:
    with Held() as held, TestPlugin(nri_socket, handlers={"StopPodSandbox": held}) as plugin:
        pod = server.run_pod()
        container = server.launch(pod)
        pause, address = plugin.wait_for("RunPodSandbox").pod.pid, server.pod_status(pod).network.ip
        finish = in_thread(lambda: server.stop_pod(pod))
        assert held.reached.wait(60)
        assert server.status(container).state == cri.CONTAINER_EXITED
        assert server.pod_status(pod).id == pod and held.request.pod.ips
        assert os.path.exists(f"/proc/{pause}/ns/net"), "the pause process lives"
        leases = [lease.parent.name for lease in (server.folder / "leases").rglob(address)]
        assert leases and "leaving" not in leases, "the network is attached"
        held.__exit__()
        finish()
        server.stop_pod(pod)
        assert plugin.methods(pod).count("StopPodSandbox") == 1
        assert plugin.methods(container)[-1] == "StopContainer"
        with pytest.raises(grpc.RpcError):
            server.create(pod)
        assert plugin.methods().count("CreateContainer") == 1


def test_invalid_requests_reach_no_plugin(server: Server, nri_socket: Path) -> None:
    config = server.pod_config()
    pod = server.run_pod(config)
    with TestPlugin(nri_socket) as plugin:
        assert server.run_pod(config) == pod
        for call, request in (
            ("RunPodSandbox", cri.RunPodSandboxRequest(config=cri.PodSandboxConfig())),
            ("CreateContainer", cri.CreateContainerRequest(pod_sandbox_id="0" * 64)),
            ("CreateContainer", cri.CreateContainerRequest(pod_sandbox_id=pod)),
            ("StartContainer", cri.StartContainerRequest(container_id="0" * 64)),
        ):
            with pytest.raises(grpc.RpcError):
                getattr(server.runtime, call)(request, timeout=30)
        server.stop_container("0" * 64)
        server.remove_container("0" * 64)
        server.stop_pod("0" * 64)
        server.remove_pod("0" * 64)
        assert plugin.methods() == []


def test_an_update_of_a_pods_resources_has_two_events(server: Server, nri_socket: Path) -> None:
    refuse: list[str] = []

    def perhaps(request: Any) -> None:
        if refuse:
            raise Refused(refuse.pop())

    handlers = {"UpdatePodSandbox": perhaps, "PostUpdatePodSandbox": once("nobody minds")}
    with TestPlugin(nri_socket, handlers=handlers) as plugin:
        pod = server.run_pod()
        request = cri.UpdatePodSandboxResourcesRequest(
            pod_sandbox_id=pod,
            overhead=cri.LinuxContainerResources(cpu_shares=10),
            resources=cri.LinuxContainerResources(cpu_quota=5000, memory_limit_in_bytes=1 << 30),
        )
        too_much = cri.UpdatePodSandboxResourcesRequest(
            pod_sandbox_id=pod, resources=cri.LinuxContainerResources(cpu_quota=9999)
        )
        server.runtime.UpdatePodSandboxResources(request, timeout=30)
        seen = plugin.wait_for("UpdatePodSandbox")
        assert seen.overhead_linux_resources.cpu.shares.value == 10
        assert seen.linux_resources.memory.limit.value == 1 << 30
        assert plugin.methods(pod)[1:] == ["UpdatePodSandbox", "PostUpdatePodSandbox"]
        refuse.append("too much")
        with pytest.raises(grpc.RpcError, match="UpdatePodSandbox: too much"):
            server.runtime.UpdatePodSandboxResources(too_much, timeout=30)
        assert plugin.methods(pod)[3:] == ["UpdatePodSandbox"]
        status = cri.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
        info = json.loads(server.runtime.PodSandboxStatus(status, timeout=30).info["info"])
        assert info["overhead"] == {"linux": {"cpu_shares": 10}}
        assert info["resources"] == {"linux": {"cpu_quota": 5000, "memory_limit_in_bytes": 1 << 30}}


def test_a_plugin_of_an_older_interface_gets_state_changes(
    server: Server, nri_socket: Path
) -> None:
    def unimplemented(request: Any) -> None:
        raise Refused("no such method", 12)

    names = (
        "RunPodSandbox",
        "StopPodSandbox",
        "RemovePodSandbox",
        "StartContainer",
        "PostCreateContainer",
    )
    with TestPlugin(nri_socket, handlers=dict.fromkeys(names, unimplemented)) as plugin:
        pod = server.run_pod()
        container = server.launch(pod)
        server.stop_pod(pod)
        server.remove_pod(pod)
        changes = [request.event for name, request in plugin.calls if name == "StateChange"]
        assert changes == [
            api.RUN_POD_SANDBOX,
            api.POST_CREATE_CONTAINER,
            api.START_CONTAINER,
            api.STOP_POD_SANDBOX,
            api.REMOVE_POD_SANDBOX,
        ]
        started = plugin.wait_for("StateChange", container)
        assert (started.pod.id, started.container.id) == (pod, container)


def test_a_plugin_gets_only_subscribed_events(server: Server, nri_socket: Path) -> None:
    with TestPlugin(nri_socket, events=1 << (api.START_CONTAINER - 1)) as plugin:
        pod = server.run_pod()
        server.launch(pod)
        server.stop_pod(pod)
        assert plugin.methods() == ["StartContainer"]


def test_a_plugin_that_dies_during_a_request_fails_nothing(
    server: Server, nri_socket: Path
) -> None:
    with TestPlugin(nri_socket, index="10") as other, TestPlugin(nri_socket, index="05") as plugin:
        plugin.handlers["CreateContainer"] = lambda _: plugin.hang_up()
        container = server.launch(server.run_pod())
        plugin.wait(lambda: plugin.closed)
        assert "CreateContainer" in other.methods(container)
        assert "NRI plugin 05-test is disconnected: CreateContainer" in server.tail()
