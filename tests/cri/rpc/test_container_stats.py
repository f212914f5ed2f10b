"""ContainerStats: the statistics of one container, as read from its cgroup."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.groups import BUSY, group_of, used_ns
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until


def stats_of(server: Server, container: str) -> api.ContainerStats:
    request = api.ContainerStatsRequest(container_id=container)
    return server.runtime.ContainerStats(request, timeout=30).stats


@pytest.mark.requirement("10.1.2", "10.1.3", "10.1.12", "10.1.16", "10.1.17", "12.2", "13.20")
def test_a_container_that_works_has_usage(server: Server) -> None:
    labels = {"io.kubernetes.pod.name": "p"}
    config = server.container_config(BUSY, labels=labels, annotations={"a": ""})
    container = server.launch(server.run_pod(), config)

    def busy() -> bool:
        cpu = stats_of(server, container).cpu
        return bool(cpu.timestamp and cpu.usage_core_nano_seconds.value > 50_000_000)

    assert wait_until(busy, 60)
    before = used_ns(group_of(server, container))
    stats = stats_of(server, container)
    assert before <= stats.cpu.usage_core_nano_seconds.value <= used_ns(group_of(server, container))
    assert stats.attributes.id == container and stats.attributes.metadata.name == "c"
    assert dict(stats.attributes.labels) == labels and dict(stats.attributes.annotations) == {
        "a": ""
    }
    assert stats.memory.timestamp and stats.memory.working_set_bytes.value > 0
    assert stats.writable_layer.timestamp and Path(stats.writable_layer.fs_id.mountpoint).is_dir()
    assert stats.writable_layer.HasField("used_bytes") and stats.writable_layer.HasField(
        "inodes_used"
    )


@pytest.mark.requirement("10.1.4")
def test_a_rate_takes_two_samples(server: Server) -> None:
    container = server.launch(server.run_pod(), server.container_config(BUSY))
    assert not stats_of(server, container).cpu.HasField("usage_nano_cores"), "a rate of one sample"
    assert wait_until(
        lambda: stats_of(server, container).cpu.usage_nano_cores.value > 10_000_000, 30
    )


@pytest.mark.requirement("1.a.1")
def test_an_unknown_container_is_not_found(server: Server) -> None:
    assert code_of(lambda: stats_of(server, "f" * 64)) == grpc.StatusCode.NOT_FOUND


@pytest.mark.requirement("10.1.1")
def test_an_ended_container_has_no_processes_to_measure(server: Server) -> None:
    """The statistics of a container that has ended have its id, but neither CPU time nor memory."""
    container = server.launch(server.run_pod(), server.container_config(["true"]))
    server.wait_exit(container)
    stats = stats_of(server, container)
    assert stats.attributes.id == container
    assert not stats.HasField("cpu") and not stats.HasField("memory")
