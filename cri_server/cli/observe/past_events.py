"""Converts entries of the server's timeline to CRI's messages of past events.

A message has only the names and ids of pod and container, because an entry has no statuses and no
labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cri_server.api import api_pb2 as api

if TYPE_CHECKING:
    from cri_server.observability.timeline.ring import Entry

CREATED, STARTED = api.CONTAINER_CREATED_EVENT, api.CONTAINER_STARTED_EVENT
STOPPED, DELETED = api.CONTAINER_STOPPED_EVENT, api.CONTAINER_DELETED_EVENT
OF_PODS = {
    "RunPodSandbox": (CREATED, STARTED),
    "RestorePod": (CREATED, STARTED),
    "StopPodSandbox": (STOPPED,),
    "RemovePodSandbox": (DELETED,),
}
ENDED = "container ended"
OF_CONTAINERS = {
    "CreateContainer": CREATED,
    "StartContainer": STARTED,
    ENDED: STOPPED,
    "RemoveContainer": DELETED,
}


def events(entries: Iterable[Entry]) -> Iterator[api.ContainerEventResponse]:
    """Yield the events of successful calls, in the order of `entries`. `entries` must be sorted by
    the end of the calls.

    When a pod was removed, also yields the deletion of its containers."""
    containers_by_pod: dict[str, dict[str, str]] = {}  # container names by id
    for entry in entries:
        call, pod = entry["call"], str(entry.get("pod_id", ""))
        # A failed call was undone, so nothing was created or deleted.
        if call != ENDED and entry.get("outcome") != "OK":
            continue
        if call in OF_PODS:
            if call == "RemovePodSandbox":
                for identifier, name in containers_by_pod.pop(pod, {}).items():
                    yield _event(entry, DELETED, identifier, name)
            for kind in OF_PODS[call]:
                yield _event(entry, kind, pod, "")
        elif call in OF_CONTAINERS:
            identifier, name = str(entry.get("container_id", "")), str(entry.get("container", ""))
            of_pod = containers_by_pod.setdefault(pod, {})
            if call == "RemoveContainer":
                of_pod.pop(identifier, None)
            else:
                of_pod[identifier] = name
            yield _event(entry, OF_CONTAINERS[call], identifier, name)


def _event(entry: Entry, kind: int, identifier: str, container: str) -> api.ContainerEventResponse:
    """Build an event message. `kind`: CRI's ContainerEventType; `identifier`: the id of the
    container or pod; `container`: the container's name, empty for an event of the pod."""
    namespace, _, name = str(entry.get("pod", "")).rpartition("/")
    # The entry of an exit ends when the server learns of the exit, and begins at the exit itself.
    when = entry["started_at_ns"] if entry["call"] == ENDED else entry.get("ended_at_ns", 0)
    event = api.ContainerEventResponse(
        container_id=identifier,
        container_event_type=kind,  # type: ignore[arg-type]
        created_at=when,
    )
    event.pod_sandbox_status.id = str(entry.get("pod_id", ""))
    event.pod_sandbox_status.metadata.name = name
    event.pod_sandbox_status.metadata.namespace = namespace
    if container:
        event.containers_statuses.add(id=identifier).metadata.name = container
    return event
