"""RemoveContainer kills the processes and deletes the files of one container, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("3.2.2", "4.4.1")
def test_removal_kills_and_is_idempotent(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    with ThreadPoolExecutor() as pool:
        list(pool.map(server.remove_container, [container] * 5))
    server.remove_container(container)
    server.launch(pod, server.container_config(metadata=api.ContainerMetadata(name="d", attempt=1)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(server.stop_pod, [pod] * 5))
        list(pool.map(server.remove_pod, [pod] * 5))
    server.stop_pod(pod), server.remove_pod(pod)
    assert not server.containers() and not server.pods()
    assert not list((server.state / "containers").iterdir())
    assert not list((server.state / "sandboxes").iterdir())
    assert not list((server.root / "containers").iterdir())
