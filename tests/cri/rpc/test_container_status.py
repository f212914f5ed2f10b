"""ContainerStatus: states, exit codes and the fields that kubelet compares."""

from __future__ import annotations

import json
import re
import time

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.checkpoints.names import ANNOTATIONS
from cri_server.images.formats import manifest as types
from tests.cri.rpc.images import an_image, pull, remove
from tests.cri.server_harness import IMAGE, Server, code_of, message_of
from tests.support.oci_archives import manifest_of
from tests.support.registry import Registry


@pytest.mark.requirement("1.b.4", "4.5.2", "4.6.1", "4.6.6")
def test_a_status_has_the_fields_that_kubelet_checks(server: Server) -> None:
    pod = server.run_pod(server.pod_config(labels={"a": "1", "empty": ""}, annotations={"b": "2"}))
    container = server.launch(
        pod, server.container_config(labels={"l": "x"}, annotations={"n": ""})
    )
    sandbox, status = server.pod_status(pod), server.status(container)
    assert dict(sandbox.labels) == {"a": "1", "empty": ""} and dict(sandbox.annotations) == {
        "b": "2"
    }
    assert sandbox.linux.namespaces.options.pid == api.CONTAINER
    assert dict(status.labels) == {"l": "x"} and dict(status.annotations) == {"n": ""}
    assert status.id == container and status.metadata == api.ContainerMetadata(name="c")
    assert status.image.image and status.image_ref and status.created_at
    (listed,) = server.containers()
    image = server.image.ImageStatus(api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE))).image
    assert listed.image_id == status.image_id == image.id
    assert status.log_path == str(server.logs / "pod1" / "c.log") or status.log_path.endswith(
        "/c.log"
    )
    assert status.stop_signal == api.SIGNAL_SIGTERM
    assert list(status.user.linux.supplemental_groups) == [0]


@pytest.mark.requirement("2.6", "2.7")
def test_a_status_has_exit_code_and_reason(server: Server) -> None:
    pod = server.run_pod()
    for name, script, code, reason in (
        ("zero", "exit 0", 0, "Completed"),
        ("seven", "exit 7", 7, "Error"),
        ("signal", "kill -9 $$; sleep 5", 137, "Error"),
    ):
        config = server.container_config(
            ["sh", "-c", script], metadata=api.ContainerMetadata(name=name)
        )
        config.linux.security_context.namespace_options.pid = api.NODE
        status = server.wait_exit(server.launch(pod, config))
        assert (status.exit_code, status.reason) == (code, reason), name


@pytest.mark.requirement("1.9")
def test_id_prefixes_are_understood(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in (pod, container))
    assert server.status(container[:12]).id == container
    assert server.pod_status(pod[:12]).id == pod
    assert code_of(lambda: server.status("")) == grpc.StatusCode.NOT_FOUND


@pytest.mark.requirement("1.8", "2.6", "4.6.1")
def test_times_are_in_nanoseconds(server: Server) -> None:
    before = time.time_ns()
    container = server.create(server.run_pod())
    created = server.status(container)
    assert (
        before < created.created_at < time.time_ns()
        and created.started_at == created.finished_at == 0
    )
    server.start_container(container)
    running = server.status(container)
    assert created.created_at < running.started_at < time.time_ns() and running.finished_at == 0
    server.stop_container(container)
    ended = server.status(container)
    assert running.started_at < ended.finished_at < time.time_ns()
    assert (ended.created_at, ended.started_at) == (created.created_at, running.started_at)


@pytest.mark.requirement("4.1.2", "4.6.1")
def test_a_status_has_the_image_under_every_name(server: Server) -> None:
    image = server.image.ImageStatus(api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE))).image
    pod = server.run_pod()
    # kubelet creates containers by the image's id, and passes the name in the pod as
    # `user_specified_image`.
    for name in (IMAGE, image.id, image.id.removeprefix("sha256:")[:12]):
        spec = api.ImageSpec(image=name, user_specified_image="busybox")
        container = server.create(pod, server.container_config(image=spec))
        status = server.status(container)
        assert (status.image_id, status.image.user_specified_image) == (image.id, "busybox"), name
        assert status.image.image == IMAGE
        server.remove_container(container)


@pytest.mark.requirement("4.6.6", "4.1.9")
def test_a_status_has_the_requested_stop_signal(server: Server) -> None:
    config = server.container_config(stop_signal=api.SIGNAL_SIGRTMINPLUS3)
    assert (
        server.status(server.create(server.run_pod(), config)).stop_signal
        == api.SIGNAL_SIGRTMINPLUS3
    )


@pytest.mark.requirement("4.6.1")
def test_a_status_has_the_image_name_of_the_pod(server: Server, registry: Registry) -> None:
    """If an image has several names, the status of a container has the name that its pod uses."""
    host = registry.host
    digests = [
        registry.push(name, an_image("names")) for name in ("z/app:v2", "z/app:v1", "a/copy:v1")
    ]
    (identifier,) = {
        pull(server, f"{host}/{name}") for name in ("z/app:v2", "z/app:v1", "a/copy:v1")
    }
    digest = digests[0]
    pod = server.run_pod()
    for reference, image, image_ref in (
        (f"{host}/z/app:v1", f"{host}/z/app:v1", f"{host}/z/app@{digest}"),
        (f"{host}/z/app:v2", f"{host}/z/app:v2", f"{host}/z/app@{digest}"),
        (f"{host}/a/copy:v1", f"{host}/a/copy:v1", f"{host}/a/copy@{digest}"),
        (f"{host}/z/app@{digest}", f"{host}/z/app@{digest}", f"{host}/z/app@{digest}"),
        (f"{host}/z/app:gone", f"{host}/z/app@{digest}", f"{host}/z/app@{digest}"),
        ("", f"{host}/a/copy:v1", f"{host}/a/copy@{digest}"),
    ):
        # kubelet passes the image's id together with the name in the pod.
        spec = api.ImageSpec(image=identifier, user_specified_image=reference)
        container = server.create(pod, server.container_config(image=spec))
        status = server.status(container)
        assert (status.image.image, status.image_ref, status.image_id) == (
            image,
            image_ref,
            identifier,
        )
        assert status.image.user_specified_image == reference
        server.remove_container(container)
    remove(server, identifier)


def test_a_checkpoint_image_is_recognised_by_the_manifest_of_its_name(
    server: Server, registry: Registry
) -> None:
    """If an ordinary image and a checkpoint have the same image id, the name in the request
    decides."""
    host = registry.host
    registry.push("public/app:v1", an_image("copied"))
    data, _ = manifest_of(an_image("copied"))
    claim = {**json.loads(data), "annotations": {ANNOTATIONS[0]: "c"}}
    registry.put_manifest("mine/copy:v1", json.dumps(claim).encode(), types.OCI_MANIFEST)
    (identifier,) = {pull(server, f"{host}/{name}") for name in ("mine/copy:v1", "public/app:v1")}
    pod = server.run_pod()
    for reference in (f"{host}/public/app:v1", ""):
        spec = api.ImageSpec(image=identifier, user_specified_image=reference)
        server.remove_container(server.create(pod, server.container_config(image=spec)))
    spec = api.ImageSpec(image=identifier, user_specified_image=f"{host}/mine/copy:v1")
    words = message_of(lambda: server.create(pod, server.container_config(image=spec)))
    assert "holds a checkpoint" in words
    remove(server, identifier)
