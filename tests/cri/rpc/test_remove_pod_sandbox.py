"""RemovePodSandbox removes a pod with its containers, and leaves files of the host."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


@pytest.mark.requirement("3.3.1", "3.3.2", "1.a.2")
def test_containers_are_removed_and_files_of_the_host_stay(server: Server) -> None:
    """RemovePodSandbox also stops a running pod. Afterwards the pod's name is free again."""
    folder = server.folder / "kept"
    folder.mkdir()
    (folder / "data").write_text("data")
    config = server.pod_config("removed")
    pod = server.run_pod(config)
    mount = api.Mount(container_path="/data", host_path=str(folder))
    container = server.launch(pod, server.container_config(["echo", "said"], mounts=[mount]))
    server.launch(pod, server.container_config(metadata=api.ContainerMetadata(name="runs")))
    server.wait_exit(container)
    log = Path(server.status(container).log_path)
    server.remove_pod(pod)
    assert not server.pods() and not server.containers()
    assert code_of(lambda: server.pod_status(pod)) == grpc.StatusCode.NOT_FOUND
    assert code_of(lambda: server.status(container)) == grpc.StatusCode.NOT_FOUND
    assert "said" in log.read_text() and (folder / "data").read_text() == "data"
    server.remove_pod(pod)
    server.remove_pod("f" * 64)
    assert server.run_pod(config) != pod
