"""StopPodSandbox ends the pod's processes, keeps the pod in the lists, and may be repeated."""

from __future__ import annotations

import subprocess

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until


@pytest.mark.requirement("3.2.3", "4.1.1", "4.2.1")
def test_nothing_starts_in_a_stopped_pod(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod)
    server.stop_pod(pod)
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.FAILED_PRECONDITION
    config = server.container_config(metadata=api.ContainerMetadata(name="late"))
    assert code_of(lambda: server.create(pod, config)) == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.requirement("3.2.1", "3.2.4")
def test_containers_are_killed_and_the_address_is_free(server: Server) -> None:
    """When StopPodSandbox returns, the lease of the pod's address is gone."""
    pod = server.run_pod()
    container = server.launch(pod)
    address = server.pod_status(pod).network.ip
    leases = server.folder / "leases"
    assert list(leases.rglob(address)), "a lease is a file that is called as the address"
    server.stop_pod(pod)
    ended = server.status(container)
    assert (ended.state, ended.exit_code) == (api.CONTAINER_EXITED, 137)
    assert not [lease for lease in leases.rglob(address) if lease.parent.name != "leaving"]
    links = server.in_its_network("ip", "-o", "link", "show", "type", "veth")
    assert wait_until(lambda: not subprocess.run(links, capture_output=True, check=True).stdout, 30)
