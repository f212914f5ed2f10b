"""PodSandboxStatus: the fields that kubelet compares with the pod's specification."""

from __future__ import annotations

import ipaddress
import json
import os
import signal

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until


@pytest.mark.requirement("3.4.1", "1.b.3", "2.10", "1.8")
def test_the_status_has_the_fields_that_kubelet_checks(server: Server) -> None:
    config = server.pod_config(labels={"a": "1", "empty": ""}, annotations={"b": "2"})
    config.metadata.attempt = 4
    pod = server.run_pod(config)
    status = server.pod_status(pod)
    assert (status.id, status.state) == (
        pod,
        api.SANDBOX_READY,
    ) and status.metadata == config.metadata
    assert status.created_at > 10**18, "nanoseconds"
    assert ipaddress.ip_address(status.network.ip).version == 4
    assert status.linux.namespaces.options == config.linux.security_context.namespace_options
    assert dict(status.labels) == {"a": "1", "empty": ""} and dict(status.annotations) == {"b": "2"}


@pytest.mark.requirement("3.4.3")
def test_the_verbose_status_has_the_pid(server: Server) -> None:
    pod = server.run_pod()
    assert not verbose(server, pod, False).info
    info = json.loads(verbose(server, pod).info["info"])
    assert os.readlink(f"/proc/{info['pid']}/exe").startswith("/memfd:pyrunc:pause")


@pytest.mark.requirement("3.4.2", "2.1")
def test_a_pod_without_its_pause_process_is_not_ready(server: Server) -> None:
    pod = server.run_pod()
    os.kill(json.loads(verbose(server, pod).info["info"])["pid"], signal.SIGKILL)
    assert wait_until(lambda: server.pod_status(pod).state == api.SANDBOX_NOTREADY, 60)


@pytest.mark.requirement("3.4.4", "13.7", "10.3.4")
def test_a_pods_status_has_the_statuses_of_its_containers(server: Server) -> None:
    pod, other = server.run_pod(), server.run_pod()
    container = server.launch(pod)
    server.create(other)
    first = verbose(server, pod, False)
    assert list(first.containers_statuses) == [server.status(container)]
    server.stop_container(container)
    second = verbose(server, pod, False)
    assert [c.state for c in second.containers_statuses] == [api.CONTAINER_EXITED]
    assert 10**18 < first.timestamp < second.timestamp


@pytest.mark.requirement("3.4.5", "1.a.1")
def test_an_unknown_pod_is_not_found(server: Server) -> None:
    assert code_of(lambda: server.pod_status("f" * 64)) == grpc.StatusCode.NOT_FOUND
    assert code_of(lambda: server.pod_status("")) == grpc.StatusCode.NOT_FOUND


def verbose(server: Server, pod: str, verbose_info: bool = True) -> api.PodSandboxStatusResponse:
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=verbose_info)
    return server.runtime.PodSandboxStatus(request, timeout=30)
