"""StreamPodSandboxMetrics: the reply of ListPodSandboxMetrics in parts."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("10.4.1")
def test_the_stream_has_the_items_of_the_list(server: Server) -> None:
    assert streamed(server) == {}
    first, second = server.run_pod(), server.run_pod()
    container = server.launch(first)
    metrics = streamed(server)
    assert set(metrics) == {first, second}
    assert [c.container_id for c in metrics[first].container_metrics] == [container]
    listed = server.runtime.ListPodSandboxMetrics(api.ListPodSandboxMetricsRequest()).pod_metrics
    names = {m.name for pod in listed for m in pod.metrics}
    assert names and names == {m.name for pod in metrics.values() for m in pod.metrics}


def streamed(server: Server) -> dict[str, api.PodSandboxMetrics]:
    parts = list(
        server.runtime.StreamPodSandboxMetrics(api.StreamPodSandboxMetricsRequest(), timeout=30)
    )
    assert all(part.pod_sandbox_metrics for part in parts), "no part without metrics"
    pods = [pod for part in parts for pod in part.pod_sandbox_metrics]
    assert len({pod.pod_sandbox_id for pod in pods}) == len(pods)
    return {pod.pod_sandbox_id: pod for pod in pods}
