"""ListPodSandboxMetrics: samples of the metrics that ListMetricDescriptors describes."""

from __future__ import annotations

import time

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.processes import wait_until


@pytest.mark.requirement("10.2.4", "10.2.9", "10.2.12")
def test_metrics_are_those_of_list_metric_descriptors(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(["sh", "-c", "while :; do :; done"]))
    request = api.ListMetricDescriptorsRequest()
    announced = {
        d.name: list(d.label_keys)
        for d in server.runtime.ListMetricDescriptors(request).descriptors
    }
    assert len(announced) == 56
    deadline = time.monotonic() + 60
    while True:
        (pod_metrics,) = server.runtime.ListPodSandboxMetrics(
            api.ListPodSandboxMetricsRequest()
        ).pod_metrics
        (of_container,) = pod_metrics.container_metrics
        values = {m.name: m.value.value for m in of_container.metrics}
        if values["container_cpu_usage_seconds_total"] >= 1:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert pod_metrics.pod_sandbox_id == pod and of_container.container_id == container
    everything = [*pod_metrics.metrics, *of_container.metrics]
    assert all(
        len(m.label_values) == len(announced[m.name]) and m.HasField("value") for m in everything
    )
    optional = {
        n
        for n in announced
        if n.startswith(
            tuple(
                f"container_{w}" for w in ("fs_reads", "fs_writes", "blkio", "hugetlb", "pressure")
            )
        )
    }
    assert {m.name for m in everything} >= announced.keys() - optional
    assert values["container_processes"] == 1
    assert (
        values["container_start_time_seconds"] > 1_600_000_000
        and values["container_file_descriptors"] >= 3
    )
    assert values["container_ulimits_soft"] == 1024
    own_rate = api.ContainerStatsRequest(container_id=container)
    first = server.runtime.ContainerStats(own_rate).stats.cpu
    assert not first.HasField("usage_nano_cores"), "a rate of one sample"
    assert wait_until(
        lambda: (
            server.runtime.ContainerStats(own_rate).stats.cpu.usage_nano_cores.value > 10_000_000
        ),
        30,
    )
    (streamed,) = server.runtime.StreamPodSandboxMetrics(api.StreamPodSandboxMetricsRequest())
    assert streamed.pod_sandbox_metrics[0].pod_sandbox_id == pod


@pytest.mark.requirement("10.2.3", "10.2.2")
def test_samples_have_the_pods_and_containers_names(server: Server) -> None:
    """Each sample has the names of the pod and the container as labels, in the descriptor's
    order."""
    pod = server.run_pod()
    container = server.launch(pod)
    keys = {
        d.name: list(d.label_keys)
        for d in server.runtime.ListMetricDescriptors(
            api.ListMetricDescriptorsRequest()
        ).descriptors
    }
    (pod_metrics,) = server.runtime.ListPodSandboxMetrics(
        api.ListPodSandboxMetricsRequest()
    ).pod_metrics
    network = [m for m in pod_metrics.metrics if m.name.startswith("container_network_")]
    assert {m.label_values[keys[m.name].index("interface")] for m in network} == {"eth0"}
    (of_container,) = pod_metrics.container_metrics
    assert not [m for m in of_container.metrics if m.name.startswith("container_network_")]
    name = server.pod_status(pod).metadata.name
    for metric in (*pod_metrics.metrics, *of_container.metrics):
        labels = dict(zip(keys[metric.name], metric.label_values, strict=True))
        assert (labels["pod"], labels["namespace"]) == (name, "default"), metric
    for metric in of_container.metrics:
        labels = dict(zip(keys[metric.name], metric.label_values, strict=True))
        assert labels["container"] == "c" and container in labels["id"], metric
