"""StreamPodSandboxStats: the reply of ListPodSandboxStats in parts."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("10.1.1", "10.4.1")
def test_the_stream_has_the_items_of_the_list(server: Server) -> None:
    first = server.run_pod(server.pod_config(labels={"k": "v"}))
    second = server.run_pod(host_network=True)
    assert streamed(server) == sorted([first, second])
    assert streamed(server, label_selector={"k": "v"}) == [first]
    assert streamed(server, id="f" * 64) == []


def streamed(server: Server, **filters: Any) -> list[str]:
    request = api.StreamPodSandboxStatsRequest(filter=api.PodSandboxStatsFilter(**filters))
    parts = list(server.runtime.StreamPodSandboxStats(request, timeout=30))
    assert all(part.pod_sandbox_stats for part in parts), "no part without figures"
    assert all(s.HasField("linux") for part in parts for s in part.pod_sandbox_stats)
    return sorted(stats.attributes.id for part in parts for stats in part.pod_sandbox_stats)
