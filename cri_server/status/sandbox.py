"""Builds the replies to PodSandboxStatus and ListPodSandbox from the server's index, and publishes
container events.

The replies are joined from cached encodings of sandboxes and containers.
"""

from __future__ import annotations

import json
from typing import TypeVar

from cri_server.api import api_pb2 as api
from cri_server.observability import events
from cri_server.services import Services
from cri_server.status import container as container_status
from cri_server.store.encoded import VARINT, entry, tag
from cri_server.store.model import Sandbox
from pyrunc.varint import varint

LISTED = tag(api.ListPodSandboxResponse, "items")  # and of StreamPodSandboxesResponse
STATUS = tag(api.PodSandboxStatusResponse, "status")
CONTAINER_STATUS = tag(api.PodSandboxStatusResponse, "containers_statuses")
Message = TypeVar("Message", api.PodSandboxStatus, api.PodSandbox)
TIMESTAMP = tag(api.PodSandboxStatusResponse, "timestamp", VARINT)


def build_status(sandbox: Sandbox) -> api.PodSandboxStatus:
    """Build the sandbox's PodSandboxStatus. Its namespace options are those of the request, because
    kubelet compares them with the pod's specification."""
    result = _with_common_fields(api.PodSandboxStatus, sandbox)
    result.linux.namespaces.options.CopyFrom(sandbox.options)
    # Set even without addresses: kubelet logs a status that has no `network`
    # (determinePodSandboxIPs).
    result.network.SetInParent()
    if sandbox.ips:
        result.network.ip = sandbox.ips[0]
        for ip in sandbox.ips[1:]:
            result.network.additional_ips.add(ip=ip)
    return result


def build_item(sandbox: Sandbox) -> api.PodSandbox:
    """Build the sandbox's entry for ListPodSandbox."""
    return _with_common_fields(api.PodSandbox, sandbox)


def _with_common_fields(kind: type[Message], sandbox: Sandbox) -> Message:
    """Build a message of class `kind`, which is PodSandboxStatus or PodSandbox, with the fields
    that both classes have."""
    config = sandbox.config
    return kind(
        id=sandbox.id,
        metadata=config.metadata,
        state=sandbox.state,  # type: ignore[arg-type]
        created_at=sandbox.created_at_ns,
        labels=config.labels,
        annotations=config.annotations,
        runtime_handler=sandbox.runtime_handler,
    )


def encode(sandbox: Sandbox) -> bytes:
    """Return the sandbox's encoded PodSandboxStatus."""
    facts = (sandbox.state, sandbox.config, tuple(sandbox.ips))
    return sandbox.cached_status.get(facts, lambda: build_status(sandbox).SerializeToString())


def encode_item(sandbox: Sandbox) -> bytes:
    """Return the sandbox's entry, encoded as a field of the reply to ListPodSandbox."""
    facts = (sandbox.state, sandbox.config)
    return sandbox.cached_entry.get(
        facts, lambda: entry(LISTED, build_item(sandbox).SerializeToString())
    )


def encode_response(services: Services, reference: str) -> bytes:
    """Return the encoded reply to PodSandboxStatus without verbose details. It has the statuses of
    the sandbox's containers. Raises NotFound."""
    sandbox = services.index.sandboxes.get(reference)
    statuses = [
        entry(CONTAINER_STATUS, container_status.encode(c))
        for c in services.index.containers_of(sandbox)
    ]
    timestamp = TIMESTAMP + varint(services.events.now_ns())
    return b"".join([entry(STATUS, encode(sandbox)), *statuses, timestamp])


async def describe(services: Services, reference: str) -> api.PodSandboxStatusResponse:
    """Return the reply to PodSandboxStatus with verbose details. Raises NotFound."""
    sandbox = services.index.sandboxes.get(reference)
    response = api.PodSandboxStatusResponse.FromString(encode_response(services, reference))
    response.info["info"] = json.dumps(await _info(services, sandbox))
    return response


async def _info(services: Services, sandbox: Sandbox) -> dict[str, object]:
    result = await services.network.result_of(sandbox.id) if sandbox.network == "attached" else None
    return {
        "pid": sandbox.pause.pid if sandbox.pause else 0,
        "shimPid": sandbox.shim.pid if sandbox.shim else 0,
        "shimReachable": sandbox.reachable,
        "netns": sandbox.netns_path,
        "cgroupsPath": sandbox.cgroups_path,
        "phase": sandbox.phase,
        "network": sandbox.network,
        "cniResult": result.raw if result else None,
        **_pod_resources(sandbox.config.linux),
    }


def _pod_resources(linux: api.LinuxPodSandboxConfig) -> dict[str, object]:
    """Return the pod's overhead and resources as last requested, under the keys that containerd
    uses. CRI's status has no fields for them."""
    return {
        name: {"linux": _figures(getattr(linux, name))}
        for name in ("overhead", "resources")
        if linux.HasField(name)  # type: ignore[arg-type]
    }


def _figures(resources: api.LinuxContainerResources) -> dict[str, object]:
    """Convert the resources that are set to a JSON object with numbers. (Protobuf's own JSON writes
    64-bit integers as strings.)"""
    figures: dict[str, object] = {
        field.name: value for field, value in resources.ListFields() if not field.is_repeated
    }
    if resources.hugepage_limits:
        limits = [
            {"page_size": each.page_size, "limit": each.limit} for each in resources.hugepage_limits
        ]
        figures["hugepage_limits"] = limits
    if resources.unified:
        figures["unified"] = dict(resources.unified)
    return figures


def event(
    services: Services, sandbox: Sandbox, about: str, kind: int
) -> api.ContainerEventResponse | None:
    """Build a container event. `about`: the id of the container or sandbox; `kind`: the event's
    type. Return None if there are no subscribers."""
    if not services.events.subscribers:
        return None
    containers = services.index.containers_of(sandbox)
    return api.ContainerEventResponse(
        container_id=about,
        container_event_type=kind,  # type: ignore[arg-type]
        pod_sandbox_status=build_status(sandbox),
        containers_statuses=[container_status.build_status(c) for c in containers],
        created_at=services.events.now_ns(),
    )


def publish_stopped(services: Services, sandbox: Sandbox) -> None:
    """Publish that the sandbox has stopped, but only at the first call for this sandbox: both the
    exit of the pause process and StopPodSandbox lead to a call."""
    if not sandbox.stop_published:
        sandbox.stop_published = True
        publish(services, sandbox, sandbox.id, events.STOPPED)


def publish(services: Services, sandbox: Sandbox, about: str, kind: int) -> None:
    """Publish a container event. `about`: the id of the container or sandbox; `kind`: the event's
    type. Call it after the server's index has the new state."""
    message = event(services, sandbox, about, kind)
    if message is not None:
        services.events.publish(message)
