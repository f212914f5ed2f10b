"""ContainerStatus: states, exit codes and the fields that kubelet compares."""

from __future__ import annotations

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server, code_of


def test_status_carries_what_kubelet_checks(server: Server) -> None:
    pod = server.run_pod(server.pod_config(labels={"a": "1", "empty": ""}, annotations={"b": "2"}))
    container = server.launch(pod, server.container_config(labels={"l": "x"}, annotations={"n": ""}))
    sandbox, status = server.pod_status(pod), server.status(container)
    assert dict(sandbox.labels) == {"a": "1", "empty": ""} and dict(sandbox.annotations) == {"b": "2"}
    assert sandbox.linux.namespaces.options.pid == api.CONTAINER
    assert dict(status.labels) == {"l": "x"} and dict(status.annotations) == {"n": ""}
    assert status.image.image and status.image_ref and status.created_at
    (listed,) = server.containers()
    image = server.image.ImageStatus(api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE))).image
    assert listed.image_id == status.image_id == image.id
    assert status.log_path == str(server.logs / "pod1" / "c.log") or status.log_path.endswith("/c.log")
    assert status.stop_signal == api.SIGNAL_SIGTERM
    assert list(status.user.linux.supplemental_groups) == [0]


def test_exit_codes(server: Server) -> None:
    pod = server.run_pod()
    for name, script, code, reason in (
        ("zero", "exit 0", 0, "Completed"),
        ("seven", "exit 7", 7, "Error"),
        ("signal", "kill -9 $$; sleep 5", 137, "Error"),
    ):
        config = server.container_config(["sh", "-c", script], metadata=api.ContainerMetadata(name=name))
        config.linux.security_context.namespace_options.pid = api.NODE
        status = server.wait_exit(server.launch(pod, config))
        assert (status.exit_code, status.reason) == (code, reason), name


def test_id_prefixes_are_understood(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    assert server.status(container[:12]).id == container
    assert server.pod_status(pod[:12]).id == pod
    assert code_of(lambda: server.status("")) == grpc.StatusCode.NOT_FOUND
