"""Tests the life of a pod and its container over the real socket, call by call, with the lists and
status after each call."""

from __future__ import annotations

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


@pytest.mark.requirement("1.b.2", "2.1", "2.4", "2.6", "2.8", "3.2.3", "4.1.3", "4.4.1", "4.6.7")
def test_a_pod_and_its_container_run_and_are_removed(server: Server) -> None:
    pod = server.run_pod()
    sandbox = server.pod_status(pod)
    assert sandbox.state == api.SANDBOX_READY and sandbox.network.ip.startswith("10.88.")
    container = server.create(pod)
    created = server.status(container)
    assert created.state == api.CONTAINER_CREATED and created.started_at == 0
    server.start_container(container)
    running = server.status(container)
    assert running.state == api.CONTAINER_RUNNING and running.started_at >= created.created_at
    assert server.output(container, "echo", "hello") == "hello\n"
    server.stop_container(container)
    exited = server.status(container)
    assert (exited.state, exited.exit_code, exited.reason) == (api.CONTAINER_EXITED, 137, "Error")
    assert exited.finished_at >= running.started_at and exited.message == ""
    server.remove_container(container)
    assert code_of(lambda: server.status(container)) == grpc.StatusCode.NOT_FOUND
    server.stop_pod(pod)
    assert server.pod_status(pod).state == api.SANDBOX_NOTREADY
    server.remove_pod(pod)
    assert code_of(lambda: server.pod_status(pod)) == grpc.StatusCode.NOT_FOUND
    assert not server.pods()
