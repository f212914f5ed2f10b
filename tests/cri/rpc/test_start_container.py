"""StartContainer: from CREATED to RUNNING, or to an exit that says why not."""

from __future__ import annotations

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of, message_of


def test_a_start_that_fails_is_an_exit(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod, server.container_config(["/no/such/program"]))
    assert "/no/such/program" in message_of(lambda: server.start_container(container))
    status = server.status(container)
    assert (status.state, status.exit_code, status.reason) == (api.CONTAINER_EXITED, 128, "StartError")
    assert status.message and status.finished_at
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.FAILED_PRECONDITION
