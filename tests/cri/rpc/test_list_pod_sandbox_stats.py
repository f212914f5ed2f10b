"""ListPodSandboxStats: the statistics of pods, read from their own cgroups and interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.processes import wait_until


@pytest.mark.requirement("10.1.16")
def test_a_pod_that_works_has_usage(server: Server) -> None:
    pod = server.run_pod()
    server.launch(pod, server.container_config(["sh", "-c", "while :; do :; done"]))
    assert wait_until(
        lambda: listed(server)[pod].linux.cpu.usage_core_nano_seconds.value > 50_000_000,  # type: ignore[no-any-return]
        60,
    )
    (only,) = listed(server).values()
    assert only.attributes.metadata.name and only.linux.network.default_interface.name == "eth0"
    assert only.linux.process.process_count.value >= 2 and only.linux.memory.timestamp


def test_a_pod_on_the_hosts_network_has_no_interfaces_of_its_own(server: Server) -> None:
    """The pod's statistics have no network counters: the node's traffic would be counted twice."""
    pod, own = server.run_pod(host_network=True), server.run_pod()
    by_pod = {identifier: stats.linux for identifier, stats in listed(server).items()}
    assert not by_pod[pod].HasField("network") and by_pod[pod].process.process_count.value == 1
    assert [i.name for i in by_pod[own].network.interfaces] == ["eth0"]


@pytest.mark.requirement("10.1.1")
def test_stats_of_pods_can_be_filtered(server: Server) -> None:
    first = server.run_pod(server.pod_config(labels={"k": "v"}))
    second, stopped = server.run_pod(), server.run_pod()
    server.stop_pod(stopped)
    assert set(listed(server)) == {first, second}
    assert set(listed(server, id=second[:13])) == {second}
    assert set(listed(server, label_selector={"k": "v"})) == {first}
    assert not listed(server, id=second, label_selector={"k": "v"})


def listed(server: Server, **filters: Any) -> dict[str, api.PodSandboxStats]:
    request = api.ListPodSandboxStatsRequest(filter=api.PodSandboxStatsFilter(**filters))
    return {
        s.attributes.id: s for s in server.runtime.ListPodSandboxStats(request, timeout=30).stats
    }
