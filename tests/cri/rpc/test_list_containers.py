"""ListContainers: all containers with the fields that kubelet reads, and filters that must all
match."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server


@pytest.mark.requirement("2.10", "4.1.7", "4.5.1", "4.5.2")
def test_each_item_has_the_containers_fields(server: Server) -> None:
    config = server.container_config(labels={"l": "x", "empty": ""}, annotations={"n": ""})
    config.metadata.attempt = 2
    pod = server.run_pod()
    container = server.create(pod, config)
    (item,) = server.containers()
    assert (item.id, item.pod_sandbox_id, item.state) == (container, pod, api.CONTAINER_CREATED)
    assert item.metadata == config.metadata and item.image.image == config.image.image
    assert dict(item.labels) == {"l": "x", "empty": ""} and dict(item.annotations) == {"n": ""}
    status = server.status(container)
    image = server.image.ImageStatus(api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE))).image
    assert item.image_id == status.image_id == image.id and item.image_ref == status.image_ref
    assert item.created_at == status.created_at


@pytest.mark.requirement("2.10", "1.a.5")
def test_containers_can_be_filtered(server: Server) -> None:
    first, second = server.run_pod(), server.run_pod()
    running = server.launch(first, server.container_config(labels={"k": "v"}))
    created = server.create(second)
    assert {c.id for c in server.containers(pod_sandbox_id=first)} == {running}
    created_state = api.ContainerStateValue(state=api.CONTAINER_CREATED)
    assert {c.id for c in server.containers(state=created_state)} == {created}
    assert not server.containers(state=created_state, pod_sandbox_id=first)
    assert {c.id for c in server.containers(label_selector={"k": "v"})} == {running}
    assert {c.id for c in server.containers(id=created[:13])} == {created}
    server.stop_container(running)
    listed = server.runtime.ListContainers(api.ListContainersRequest()).containers
    states = {running: api.CONTAINER_EXITED, created: api.CONTAINER_CREATED}
    assert {c.id: c.state for c in listed} == states, "without a filter, and those that have ended"
