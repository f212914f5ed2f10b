"""PodSandboxStatus and ListPodSandbox: messages from the index, without touching the disk; and
events with both.

Answers are joined from the wire forms that sandboxes and containers keep.
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


def of(sandbox: Sandbox) -> api.PodSandboxStatus:
    """The status message; namespace options are echoed as asked, for kubelet compares them."""
    result = _with_facts(api.PodSandboxStatus, sandbox)
    result.linux.namespaces.options.CopyFrom(sandbox.options)
    result.network.SetInParent()
    if sandbox.ips:
        result.network.ip = sandbox.ips[0]
        for ip in sandbox.ips[1:]:
            result.network.additional_ips.add(ip=ip)
    return result


def listed(sandbox: Sandbox) -> api.PodSandbox:
    """The list entry."""
    return _with_facts(api.PodSandbox, sandbox)


def _with_facts(kind: type[Message], sandbox: Sandbox) -> Message:
    """A message with the fields that the status and the list entry have in common."""
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


def wire(sandbox: Sandbox) -> bytes:
    """The status message's wire form."""
    facts = (sandbox.state, sandbox.config, tuple(sandbox.ips))
    return sandbox.kept_status.get(facts, lambda: of(sandbox).SerializeToString())


def listed_wire(sandbox: Sandbox) -> bytes:
    """The list entry as a field of a list's wire form."""
    facts = (sandbox.state, sandbox.config)
    return sandbox.kept_entry.get(facts, lambda: entry(LISTED, listed(sandbox).SerializeToString()))


def answer(services: Services, reference: str) -> bytes:
    """PodSandboxStatusResponse, not verbose: the status with those of the containers. Raises
    NotFound."""
    sandbox = services.index.sandboxes.get(reference)
    statuses = [
        entry(CONTAINER_STATUS, container_status.wire(c))
        for c in services.index.containers_of(sandbox)
    ]
    timestamp = TIMESTAMP + varint(services.events.now_ns())
    return b"".join([entry(STATUS, wire(sandbox)), *statuses, timestamp])


async def describe(services: Services, reference: str) -> api.PodSandboxStatusResponse:
    """The verbose answer. Raises NotFound."""
    sandbox = services.index.sandboxes.get(reference)
    response = api.PodSandboxStatusResponse.FromString(answer(services, reference))
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
    """What UpdatePodSandboxResources has set last, or RunPodSandbox, under containerd's keys: the
    status has none of it."""
    return {
        name: {"linux": _figures(getattr(linux, name))}
        for name in ("overhead", "resources")
        if linux.HasField(name)  # type: ignore[arg-type]
    }


def _figures(given: api.LinuxContainerResources) -> dict[str, object]:
    """Numbers as numbers, which protobuf's own JSON writes as text."""
    found: dict[str, object] = {
        field.name: value for field, value in given.ListFields() if not field.is_repeated
    }
    if given.hugepage_limits:
        limits = [
            {"page_size": each.page_size, "limit": each.limit} for each in given.hugepage_limits
        ]
        found["hugepage_limits"] = limits
    if given.unified:
        found["unified"] = dict(given.unified)
    return found


def event(
    services: Services, sandbox: Sandbox, about: str, kind: int
) -> api.ContainerEventResponse | None:
    """The event that something (a container, or the sandbox itself by its id) changed; None when
    nobody listens."""
    if not services.events.has_subscribers:
        return None
    containers = services.index.containers_of(sandbox)
    return api.ContainerEventResponse(
        container_id=about,
        container_event_type=kind,  # type: ignore[arg-type]
        pod_sandbox_status=of(sandbox),
        containers_statuses=[container_status.of(c) for c in containers],
        created_at=services.events.now_ns(),
    )


def publish_stopped(services: Services, sandbox: Sandbox) -> None:
    """Tell subscribers that the sandbox has stopped, once: its pause process's exit and
    StopPodSandbox both lead here."""
    if not sandbox.stop_published:
        sandbox.stop_published = True
        publish(services, sandbox, sandbox.id, events.STOPPED)


def publish(services: Services, sandbox: Sandbox, about: str, kind: int) -> None:
    """Tell subscribers; call it when the new state is visible."""
    found = event(services, sandbox, about, kind)
    if found is not None:
        services.events.publish(found)
