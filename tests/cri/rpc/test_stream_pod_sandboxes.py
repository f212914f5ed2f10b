"""StreamPodSandboxes: the reply of ListPodSandbox in parts."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("10.4.1", "3.5.1")
def test_the_stream_has_the_items_of_the_list(server: Server) -> None:
    first = server.run_pod(server.pod_config(labels={"k": "v"}))
    second = server.run_pod()
    server.stop_pod(second)
    assert streamed(server) == server.pods() and {p.id for p in streamed(server)} == {first, second}
    assert [p.id for p in streamed(server, label_selector={"k": "v"})] == [first]
    assert streamed(server, id="f" * 64) == []


def streamed(server: Server, **filters: Any) -> list[api.PodSandbox]:
    request = api.StreamPodSandboxesRequest(filter=api.PodSandboxFilter(**filters))
    parts = list(server.runtime.StreamPodSandboxes(request, timeout=30))
    assert all(part.pod_sandboxes for part in parts), "no part without a pod"
    return [pod for part in parts for pod in part.pod_sandboxes]
