"""StreamContainerStats: the reply of ListContainerStats in parts."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("10.1.1", "10.4.1")
def test_the_stream_has_the_items_of_the_list(server: Server) -> None:
    first, second = server.launch(server.run_pod()), server.launch(server.run_pod())
    assert streamed(server) == sorted([first, second])
    assert streamed(server, id=first) == [first]
    assert streamed(server, id="f" * 64) == []


def streamed(server: Server, **filters: Any) -> list[str]:
    request = api.StreamContainerStatsRequest(filter=api.ContainerStatsFilter(**filters))
    parts = list(server.runtime.StreamContainerStats(request, timeout=30))
    assert all(part.container_stats for part in parts), "no part without figures"
    return sorted(stats.attributes.id for part in parts for stats in part.container_stats)
