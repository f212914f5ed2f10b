"""UpdateRuntimeConfig: the node's ranges of pod addresses."""

from __future__ import annotations

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


@pytest.mark.requirement("10.5.6", "13.18")
@pytest.mark.parametrize("ranges", ["", "10.1.0.0/16", "10.1.0.0/16,fd00::/64"])
def test_ranges_of_kubelet_are_accepted(server: Server, ranges: str) -> None:
    """If the network's configuration has its own range, pods still get addresses of that range."""
    server.runtime.UpdateRuntimeConfig(update(ranges))
    assert server.pod_status(server.run_pod()).network.ip.startswith("10.88.")


def test_invalid_ranges_are_refused(server: Server) -> None:
    call = lambda: server.runtime.UpdateRuntimeConfig(update("10.1.0.0/16,10.2.0.0/99"))  # noqa: E731
    assert code_of(call) == grpc.StatusCode.INVALID_ARGUMENT


def update(ranges: str) -> api.UpdateRuntimeConfigRequest:
    request = api.UpdateRuntimeConfigRequest()
    request.runtime_config.network_config.pod_cidr = ranges
    return request
