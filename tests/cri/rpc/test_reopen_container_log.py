"""ReopenContainerLog: a rotated log goes on in a new file."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


@pytest.mark.requirement("4.8.1", "11.5")
def test_the_log_is_reopened(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(
        pod, server.container_config(["sh", "-c", "while :; do echo tick; sleep 0.05; done"])
    )
    path = Path(server.status(container).log_path)
    server.wait_logged(container, "tick")
    moved = path.with_suffix(".old")
    path.rename(moved)
    server.runtime.ReopenContainerLog(
        api.ReopenContainerLogRequest(container_id=container), timeout=30
    )
    assert path.exists()
    size = moved.stat().st_size
    server.wait_logged(container, "tick")
    assert size > 0 and moved.stat().st_size == size and path.stat().st_size > 0
    server.stop_container(container)
    path.unlink()
    request = api.ReopenContainerLogRequest(container_id=container)
    code = code_of(lambda: server.runtime.ReopenContainerLog(request, timeout=30))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and not path.exists()
