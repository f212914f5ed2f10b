"""ListPodSandboxMetrics: samples of what ListMetricDescriptors announces."""

from __future__ import annotations

import time

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.processes import wait_until


def test_metrics_are_those_that_were_announced(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(["sh", "-c", "while :; do :; done"]))
    request = api.ListMetricDescriptorsRequest()
    announced = {
        d.name: list(d.label_keys) for d in server.runtime.ListMetricDescriptors(request).descriptors
    }
    assert len(announced) == 56
    deadline = time.monotonic() + 60
    while True:
        (found,) = server.runtime.ListPodSandboxMetrics(api.ListPodSandboxMetricsRequest()).pod_metrics
        (of_container,) = found.container_metrics
        values = {m.name: m.value.value for m in of_container.metrics}
        if values["container_cpu_usage_seconds_total"] >= 1:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert found.pod_sandbox_id == pod and of_container.container_id == container
    everything = [*found.metrics, *of_container.metrics]
    assert all(len(m.label_values) == len(announced[m.name]) and m.HasField("value") for m in everything)
    optional = {
        n
        for n in announced
        if n.startswith(
            tuple(f"container_{w}" for w in ("fs_reads", "fs_writes", "blkio", "hugetlb", "pressure"))
        )
    }
    assert {m.name for m in everything} >= announced.keys() - optional
    assert values["container_processes"] == 1
    assert (
        values["container_start_time_seconds"] > 1_600_000_000 and values["container_file_descriptors"] >= 3
    )
    assert values["container_ulimits_soft"] == 1024
    own_rate = api.ContainerStatsRequest(container_id=container)
    first = server.runtime.ContainerStats(own_rate).stats.cpu
    assert not first.HasField("usage_nano_cores"), "a rate of one sample"
    assert wait_until(
        lambda: server.runtime.ContainerStats(own_rate).stats.cpu.usage_nano_cores.value > 10_000_000, 30
    )
    (streamed,) = server.runtime.StreamPodSandboxMetrics(api.StreamPodSandboxMetricsRequest())
    assert streamed.pod_sandbox_metrics[0].pod_sandbox_id == pod
