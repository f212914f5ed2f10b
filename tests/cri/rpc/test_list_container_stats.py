"""ListContainerStats: the statistics of running containers."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("10.1.1", "10.1.2")
def test_stats_can_be_filtered(server: Server) -> None:
    first, second = server.run_pod(), server.run_pod()
    labelled = server.launch(first, server.container_config(labels={"k": "v"}))
    other = server.launch(second)
    server.create(second, server.container_config(metadata=api.ContainerMetadata(name="created")))
    ended = server.container_config(["true"], metadata=api.ContainerMetadata(name="ended"))
    server.wait_exit(server.launch(second, ended))
    assert listed(server) == {labelled, other}, "those that run"
    assert listed(server, id=other) == listed(server, id=other[:13]) == {other}
    assert listed(server, pod_sandbox_id=first) == {labelled}
    assert listed(server, label_selector={"k": "v"}) == {labelled}
    assert listed(server, label_selector={"k": "v"}, pod_sandbox_id=second) == set()


def listed(server: Server, **filters: Any) -> set[str]:
    request = api.ListContainerStatsRequest(filter=api.ContainerStatsFilter(**filters))
    stats = server.runtime.ListContainerStats(request, timeout=30).stats
    assert all(s.attributes.metadata.name and s.cpu.timestamp and s.memory.timestamp for s in stats)
    return {s.attributes.id for s in stats}
