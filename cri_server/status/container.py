"""Builds the replies to ContainerStatus and ListContainers from the server's index, and caches them
encoded."""

from __future__ import annotations

import json
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.services import Services
from cri_server.spec import signals
from cri_server.status.paused import is_paused
from cri_server.store.encoded import entry, tag
from cri_server.store.model import Container, copy
from pyrunc import atomic_file
from pyrunc.errors import Error

LISTED = tag(api.ListContainersResponse, "containers")  # and of StreamContainersResponse
STATUS = tag(api.ContainerStatusResponse, "status")


def build_status(container: Container) -> api.ContainerStatus:
    """Build the container's ContainerStatus."""
    config = container.config
    status = api.ContainerStatus(
        id=container.id,
        metadata=config.metadata,
        state=container.state,  # type: ignore[arg-type]
        created_at=container.created_at_ns,
        started_at=container.started_at_ns,
        image_ref=container.image_ref,
        image_id=container.image_id,
        labels=config.labels,
        annotations=config.annotations,
        mounts=[_mount(m, container) for m in config.mounts],
        log_path=container.log_path,
        stop_signal=signals.to_cri(container.stop_signal),  # type: ignore[arg-type]
    )
    status.image.image = container.image_name
    status.image.user_specified_image = config.image.user_specified_image
    status.image.runtime_handler = config.image.runtime_handler
    status.resources.linux.CopyFrom(container.resources)
    user = container.user
    status.user.linux.uid, status.user.linux.gid = user.uid, user.gid
    status.user.linux.supplemental_groups.extend(user.groups)
    if container.exit is not None:
        status.finished_at = container.exit.finished_at_ns
        status.exit_code = container.exit.exit_code
        status.reason = container.exit.cri_reason
        status.message = container.exit.message or ""
    return status


def _mount(requested: api.Mount, container: Container) -> api.Mount:
    """Return a copy of a requested mount. For an image volume the copy also has the image's
    reference."""
    mount = copy(requested)
    image = container.mounted_images.get(requested.container_path)
    if image:
        mount.image.image_ref = image
    return mount


def build_item(container: Container) -> api.Container:
    """Build the container's entry for ListContainers."""
    config = container.config
    result = api.Container(
        id=container.id,
        pod_sandbox_id=container.sandbox_id,
        metadata=config.metadata,
        image=config.image,
        image_ref=container.image_ref,
        image_id=container.image_id,
        state=container.state,  # type: ignore[arg-type]
        created_at=container.created_at_ns,
        labels=config.labels,
        annotations=config.annotations,
    )
    # With the feature RuntimeClassInImageCriApi kubelet keeps an image if a listed container has
    # the image's id and handler. Images are listed without a handler, so a handler here would make
    # kubelet remove images in use.
    result.image.runtime_handler = ""
    return result


def encode(container: Container) -> bytes:
    """Return the container's encoded ContainerStatus."""
    facts = (container.state, container.started_at_ns, container.exit, container.resources)
    return container.cached_status.get(facts, lambda: build_status(container).SerializeToString())


def encode_item(container: Container) -> bytes:
    """Return the container's entry, encoded as a field of the reply to ListContainers."""
    facts = (container.state,)
    # A list of 500 takes 4.2 ms to build and encode, 0.03 ms to join from these (measured).
    return container.cached_entry.get(
        facts, lambda: entry(LISTED, build_item(container).SerializeToString())
    )


def encode_response(services: Services, reference: str) -> bytes:
    """Return the encoded reply to ContainerStatus without verbose details. Raises NotFound."""
    return entry(STATUS, encode(services.index.containers.get(reference)))


def describe(services: Services, reference: str) -> api.ContainerStatusResponse:
    """Return the reply to ContainerStatus with verbose details. Raises NotFound."""
    container = services.index.containers.get(reference)
    response = api.ContainerStatusResponse(status=build_status(container))
    response.info["info"] = json.dumps(_info(services, container))
    return response


def _info(services: Services, container: Container) -> dict[str, Any]:
    """Return the verbose details of a container as a JSON object: pid, cgroup, writable layer and
    OCI spec. The environment is left out of the spec, because it may contain secrets."""
    try:
        spec = atomic_file.read_json(
            str(services.paths.container_state(container.id) / "config.json")
        )
        spec.get("process", {}).pop("env", None)
    except Error:
        spec = {}
    return {
        "sandboxID": container.sandbox_id,
        "pid": container.process.pid if container.process else 0,
        "paused": is_paused(container),
        "cgroupsPath": container.cgroups_path,
        "writableLayer": str(services.paths.container_root(container.id) / "upper"),
        "runtimeSpec": spec,
    }
