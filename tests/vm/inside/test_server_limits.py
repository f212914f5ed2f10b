"""Tests that the server, with either cgroup driver, puts pods and containers into their cgroups,
with limits that the kernel's own files confirm."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.support import cri, groups, images
from tests.support.cluster import Node
from tests.support.processes import wait_until

MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
PARENTS = {"systemd": "/limits.slice", "cgroupfs": "/limits"}


class Server:
    """Our server with one cgroup driver, and a client of it."""

    def __init__(self, node: Node, client: cri.Client) -> None:
        self.node, self.client = node, client
        self.parent = PARENTS[node.cgroup_driver]

    def sandbox(self) -> tuple[str, Any]:
        name = uuid.uuid4().hex[:8]
        config = api.PodSandboxConfig(
            metadata=api.PodSandboxMetadata(name=name, uid=name, namespace="limits")
        )
        config.linux.cgroup_parent = self.parent
        config.linux.security_context.namespace_options.network = api.NODE
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        return (
            self.client.runtime.RunPodSandbox(
                api.RunPodSandboxRequest(config=config), timeout=120
            ).pod_sandbox_id,
            config,
        )

    def container(self, script: str, **resources: Any) -> str:
        pod, sandbox = self.sandbox()
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name="c"),
            image=api.ImageSpec(image="busybox"),
            command=["sh", "-c", script],
        )
        config.linux.security_context.namespace_options.network = api.NODE
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        unified = resources.pop("unified", {})
        for size, limit in resources.pop("huge_pages", {}).items():
            config.linux.resources.hugepage_limits.add(page_size=size, limit=limit)
        for field, value in resources.items():
            setattr(config.linux.resources, field, value)
        config.linux.resources.unified.update(unified)
        request = api.CreateContainerRequest(
            pod_sandbox_id=pod, config=config, sandbox_config=sandbox
        )
        container = str(self.client.runtime.CreateContainer(request, timeout=120).container_id)
        self.client.runtime.StartContainer(
            api.StartContainerRequest(container_id=container), timeout=120
        )
        return container

    def status(self, container: str) -> Any:
        return self.client.runtime.ContainerStatus(
            api.ContainerStatusRequest(container_id=container, verbose=True), timeout=60
        )

    def exited(self, container: str) -> Any:
        deadline = time.monotonic() + 60
        while (status := self.status(container).status).state != api.CONTAINER_EXITED:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return status

    def group(self, container: str) -> Path:
        group = groups.below(CGROUPS, container)
        assert len(group) == 1, group
        return group[0]


@pytest.fixture(scope="module", params=sorted(PARENTS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    node = Node(tmp_path_factory.mktemp(request.param), f"limits-{request.param[:4]}")
    node.cgroup_driver, node.missing_controllers = request.param, "error"
    try:
        node.make_network()
        node.write_configuration()
        node.start_server()
        with cri.connect(node.socket) as client:
            node.load(images.busybox())
            yield Server(node, client)
            node.remove_everything()
    finally:
        node.server.stop()
        node.remove_network()


@pytest.fixture(autouse=True)
def removed_afterwards(server: Server) -> Iterator[None]:
    yield
    server.node.remove_everything()
    assert not groups.below(CGROUPS, "cri-pyrunc")


@pytest.mark.requirement("7.1.1")
def test_the_server_uses_the_configured_cgroup_driver(server: Server) -> None:
    reply = server.client.runtime.RuntimeConfig(api.RuntimeConfigRequest())
    assert api.CgroupDriver.Name(reply.linux.cgroup_driver).lower() == server.node.cgroup_driver


@pytest.mark.requirement(
    "4.6.4", "7.1.2", "7.1.4", "7.2.1", "7.2.2", "7.2.3", "7.2.4", "7.2.5", "7.2.7", "7.2.8"
)
def test_limits_are_in_the_kernels_files(server: Server) -> None:
    container = server.container(
        "sleep 1000",
        memory_limit_in_bytes=64 * MIB,
        cpu_quota=50_000,
        cpu_period=100_000,
        cpu_shares=512,
        cpuset_cpus="0",
        unified={"memory.high": str(60 * MIB)},
        huge_pages={"2MB": 4 * MIB},
    )
    group = server.group(container)
    assert group.parent.name in ("limits.slice", "limits")
    assert (group / "memory.max").read_text().strip() == str(64 * MIB)
    assert (group / "memory.swap.max").read_text().strip() == "0"
    assert (group / "memory.high").read_text().strip() == str(60 * MIB)
    assert (group / "cpu.max").read_text().strip() == "50000 100000"
    # systemd does not delegate this controller
    assert (group / "hugetlb.2MB.max").read_text().strip() == str(4 * MIB)
    assert (group / "cpuset.cpus.effective").read_text().strip() == "0"
    assert 1 < int((group / "cpu.weight").read_text()) < 100
    resources = server.status(container).status.resources.linux
    assert (resources.memory_limit_in_bytes, resources.cpu_quota, resources.cpuset_cpus) == (
        64 * MIB,
        50_000,
        "0",
    )


@pytest.mark.requirement("4.6.4", "4.7.1", "4.7.2")
def test_an_update_changes_limits_in_place(server: Server) -> None:
    container = server.container(
        "sleep 1000", memory_limit_in_bytes=64 * MIB, cpu_quota=50_000, cpu_period=100_000
    )
    request = api.UpdateContainerResourcesRequest(container_id=container)
    request.linux.memory_limit_in_bytes = 128 * MIB
    server.client.runtime.UpdateContainerResources(request, timeout=60)
    group = server.group(container)
    assert (group / "memory.max").read_text().strip() == str(128 * MIB)
    assert (group / "cpu.max").read_text().strip() == "50000 100000"
    assert server.status(container).status.resources.linux.memory_limit_in_bytes == 128 * MIB


@pytest.mark.requirement("4.7.1")
def test_a_memory_limit_below_the_usage_is_refused(server: Server) -> None:
    script = "dd if=/dev/zero of=/dev/shm/file bs=1M count=40 2>/dev/null; sleep 1000"
    container = server.container(script, memory_limit_in_bytes=64 * MIB)
    current = server.group(container) / "memory.current"
    assert wait_until(lambda: int(current.read_text()) > 40 * MIB, 60)
    request = api.UpdateContainerResourcesRequest(container_id=container)
    # With this limit the kernel would kill the container at once.
    request.linux.memory_limit_in_bytes = 16 * MIB
    with pytest.raises(grpc.RpcError) as refused:
        server.client.runtime.UpdateContainerResources(request, timeout=60)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert (current.parent / "memory.max").read_text().strip() == str(64 * MIB)
    status = server.status(container).status
    assert status.state == api.CONTAINER_RUNNING
    assert status.resources.linux.memory_limit_in_bytes == 64 * MIB


@pytest.mark.requirement("2.7", "2.9")
def test_an_oom_kill_of_the_main_process_is_reported(server: Server) -> None:
    container = server.container(
        "exec dd if=/dev/zero of=/dev/null bs=64M count=1", memory_limit_in_bytes=15 * MIB
    )
    status = server.exited(container)
    assert (status.reason, status.exit_code) == ("OOMKilled", 137)


@pytest.mark.requirement("2.9", "14.9")
@pytest.mark.parametrize("code", [0, 3, 137])
def test_an_oom_kill_of_a_child_is_reported(server: Server, code: int) -> None:
    """The kernel's count of OOM kills decides, whatever the container's exit code is, as under
    containerd and CRI-O."""
    container = server.container(
        f"dd if=/dev/zero of=/dev/null bs=64M count=1; exit {code}", memory_limit_in_bytes=15 * MIB
    )
    status = server.exited(container)
    assert (status.reason, status.exit_code) == ("OOMKilled", code)


@pytest.mark.requirement("6.16")
def test_devices_are_filtered(server: Server) -> None:
    script = (
        "head -c 1 /dev/zero >/dev/null && mknod /tmp/mem c 1 1; head -c 1 /tmp/mem 2>/tmp/said;"
        " grep -q 'not permitted' /tmp/said && exit 33"
    )
    assert server.exited(server.container(script)).exit_code == 33


@pytest.mark.requirement("10.1.3", "10.1.6")
def test_statistics_come_from_the_group(server: Server) -> None:
    container = server.container("while true; do :; done", memory_limit_in_bytes=64 * MIB)
    time.sleep(2)
    stats = server.client.runtime.ContainerStats(
        api.ContainerStatsRequest(container_id=container)
    ).stats
    group = server.group(container)
    used = (
        int(
            dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())[
                "usage_usec"
            ]
        )
        * 1000
    )
    assert 0 < stats.cpu.usage_core_nano_seconds.value <= used
    assert 0 < stats.memory.usage_bytes.value <= 64 * MIB
    assert 0 < stats.memory.working_set_bytes.value <= stats.memory.usage_bytes.value
    assert stats.memory.available_bytes.value <= 64 * MIB


@pytest.mark.requirement("7.2.5")
def test_an_error_names_the_limit_that_could_not_be_set(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as error:
        server.container("sleep 1", unified={"memory.no_such_file": "1"})
    assert "memory.no_such_file" in error.value.details()  # type: ignore[attr-defined]
