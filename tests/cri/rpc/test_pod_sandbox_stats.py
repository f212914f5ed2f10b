"""PodSandboxStats: the statistics of one pod."""

from __future__ import annotations

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.groups import BUSY, group_of, used_ns
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until


@pytest.mark.requirement("10.1.13", "10.1.14", "10.1.16")
def test_stats_of_a_pod_include_network_processes_and_containers(server: Server) -> None:
    pod = server.run_pod(server.pod_config(labels={"io.kubernetes.pod.name": "p"}))
    container = server.launch(pod)
    server.output(container, "ping", "-c", "2", "10.88.0.1")
    stats = stats_of(server, pod)
    assert stats.attributes.id == pod and stats.attributes.metadata.name
    assert dict(stats.attributes.labels) == {"io.kubernetes.pod.name": "p"}
    network = stats.linux.network
    assert network.timestamp and network.default_interface.name == "eth0"
    assert [i.name for i in network.interfaces] == ["eth0"], "without the loopback interface"
    assert (
        min(network.default_interface.rx_bytes.value, network.default_interface.tx_bytes.value)
        >= 2 * 84
    )
    assert network.default_interface.HasField("rx_errors")
    assert stats.linux.process.process_count.value == 2, "of the pause process and the container"
    assert [c.attributes.id for c in stats.linux.containers] == [container]


@pytest.mark.requirement("10.1.15")
def test_the_statistics_of_a_pod_are_those_of_its_group(server: Server) -> None:
    """The statistics come from the pod's cgroup, so they include the pause process and containers
    that have ended, and count each running process once."""
    parent = f"/{server.folder.name}/pod-of-stats"
    pod = server.run_pod(server.pod_config(linux=api.LinuxPodSandboxConfig(cgroup_parent=parent)))
    ended = server.container_config(
        ["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"]
    )
    container = server.launch(pod, ended)
    server.wait_exit(container)
    server.remove_container(container)
    linux_stats = stats_of(server, pod).linux
    assert linux_stats.cpu.usage_core_nano_seconds.value > 20_000_000 and not linux_stats.containers
    assert linux_stats.memory.HasField("working_set_bytes")
    busy = server.container_config(BUSY, metadata=api.ContainerMetadata(name="busy"))
    group = group_of(server, server.launch(pod, busy))
    assert wait_until(lambda: used_ns(group) > 50_000_000, 60)
    before = used_ns(group.parent)
    reported_ns = stats_of(server, pod).linux.cpu.usage_core_nano_seconds.value
    assert before <= reported_ns <= used_ns(group.parent)


@pytest.mark.requirement("1.a.1")
def test_an_unknown_pod_is_not_found(server: Server) -> None:
    assert code_of(lambda: stats_of(server, "f" * 64)) == grpc.StatusCode.NOT_FOUND


def stats_of(server: Server, pod: str) -> api.PodSandboxStats:
    return server.runtime.PodSandboxStats(
        api.PodSandboxStatsRequest(pod_sandbox_id=pod), timeout=30
    ).stats
