"""StartContainer: a created container runs, or exits with the reason."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of, message_of


@pytest.mark.requirement("2.4", "2.7", "2.8", "4.2.1", "13.2")
def test_a_start_that_fails_is_an_exit(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod, server.container_config(["/no/such/program"]))
    assert "/no/such/program" in message_of(lambda: server.start_container(container))
    status = server.status(container)
    assert (status.state, status.exit_code, status.reason) == (
        api.CONTAINER_EXITED,
        128,
        "StartError",
    )
    assert status.message and status.finished_at
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.requirement("4.2.2")
def test_the_log_is_there_before_the_first_line(server: Server) -> None:
    container = server.launch(server.run_pod())
    log = Path(server.status(container).log_path)
    assert log.is_absolute() and log.read_bytes() == b""


@pytest.mark.requirement("4.2.1", "8.13")
def test_a_start_fails_when_the_target_has_ended(server: Server) -> None:
    """If the container whose process namespace is to be used has ended, StartContainer's error has
    its id."""
    pod = server.run_pod()
    target = server.launch(pod)
    config = server.container_config(metadata=api.ContainerMetadata(name="debug"))
    options = config.linux.security_context.namespace_options
    options.pid, options.target_id = api.TARGET, target
    container = server.create(pod, config)
    server.stop_container(target)
    assert target in message_of(lambda: server.start_container(container))
    assert server.status(container).state == api.CONTAINER_CREATED
    config.metadata.name = "late"
    assert target in message_of(lambda: server.create(pod, config))
