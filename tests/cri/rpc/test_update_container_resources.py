"""UpdateContainerResources: the changed limits, where they are shown, and the states that permit an
update."""

from __future__ import annotations

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


@pytest.mark.requirement("4.6.4", "4.7.1", "4.7.2")
def test_updates_are_in_the_cgroup_and_the_status(server: Server) -> None:
    container = server.create(server.run_pod())
    request = api.UpdateContainerResourcesRequest(container_id=container)
    request.linux.cpu_shares = 512
    server.runtime.UpdateContainerResources(request)
    request.linux.cpu_shares, request.linux.cpu_quota = 0, 50_000
    server.runtime.UpdateContainerResources(request)
    resources = server.status(container).resources.linux
    assert (resources.cpu_shares, resources.cpu_quota) == (512, 50_000)
    server.start_container(container)
    server.stop_container(container)
    code = code_of(lambda: server.runtime.UpdateContainerResources(request))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
