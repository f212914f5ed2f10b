"""UpdatePodSandboxResources: the resources of a resized pod, which kubelet writes to the pod's
cgroup itself."""

from __future__ import annotations

import json

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


@pytest.mark.requirement("3.6.1", "7.2.9")
def test_the_values_are_stored() -> None:
    """The updated CPU shares and memory limit also survive a kill of the server."""
    with Server() as server:
        pod = server.run_pod()
        for shares in (512, 256):
            server.runtime.UpdatePodSandboxResources(request(pod, shares), timeout=30)
            assert saved(server, pod) == (shares, 7 << 20)
        server.restart()
        assert saved(server, pod) == (256, 7 << 20)


@pytest.mark.requirement("3.6.1")
def test_an_unknown_pod_is_not_found(server: Server) -> None:
    call = lambda: server.runtime.UpdatePodSandboxResources(request("f" * 64, 2), timeout=30)  # noqa: E731
    assert code_of(call) == grpc.StatusCode.NOT_FOUND


def request(pod: str, shares: int) -> api.UpdatePodSandboxResourcesRequest:
    update = api.UpdatePodSandboxResourcesRequest(pod_sandbox_id=pod)
    update.resources.cpu_shares, update.overhead.memory_limit_in_bytes = shares, 7 << 20
    return update


def saved(server: Server, pod: str) -> tuple[int, int]:
    """Return the CPU shares and the overhead's memory limit that the server has stored for the
    pod."""
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    info = json.loads(server.runtime.PodSandboxStatus(request, timeout=30).info["info"])
    return info["resources"]["linux"]["cpu_shares"], info["overhead"]["linux"][
        "memory_limit_in_bytes"
    ]
