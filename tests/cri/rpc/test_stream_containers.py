"""StreamContainers: the reply of ListContainers in parts."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("10.4.1", "4.5.1")
def test_the_stream_has_the_items_of_the_list(server: Server) -> None:
    pod = server.run_pod()
    running = server.launch(pod)
    created = server.create(
        pod, server.container_config(metadata=api.ContainerMetadata(name="second"))
    )
    assert streamed(server) == server.containers()
    assert {c.id for c in streamed(server)} == {running, created}
    state = api.ContainerStateValue(state=api.CONTAINER_CREATED)
    assert [c.id for c in streamed(server, state=state)] == [created]
    assert streamed(server, pod_sandbox_id="f" * 64) == []


def streamed(server: Server, **filters: Any) -> list[api.Container]:
    request = api.StreamContainersRequest(filter=api.ContainerFilter(**filters))
    parts = list(server.runtime.StreamContainers(request, timeout=30))
    assert all(part.containers for part in parts), "no part without a container"
    return [container for part in parts for container in part.containers]
