"""StopPodSandbox: what ends, what stays to be asked for, and how often it may be called."""

from __future__ import annotations

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


def test_nothing_starts_in_a_stopped_pod(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod)
    server.stop_pod(pod)
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.FAILED_PRECONDITION
    config = server.container_config(metadata=api.ContainerMetadata(name="late"))
    assert code_of(lambda: server.create(pod, config)) == grpc.StatusCode.FAILED_PRECONDITION
