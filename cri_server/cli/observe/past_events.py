"""Events of the past, as CRI's messages, from the entries of the server's timeline.

An entry has a pod's and a container's name and id, but no statuses and no labels.
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
    """The events of calls that succeeded, in the order of `entries`, which is that of their ends.

    RemovePodSandbox also deletes containers that the entries before it have made.
    """
    made: dict[str, dict[str, str]] = {}  # by the pod's id: names by containers' ids
    for entry in entries:
        call, pod = entry["call"], str(entry.get("pod_id", ""))
        if call != ENDED and entry.get("outcome") != "OK":
            continue
        if call in OF_PODS:
            if call == "RemovePodSandbox":
                for identifier, name in made.pop(pod, {}).items():
                    yield _event(entry, DELETED, identifier, name)
            for kind in OF_PODS[call]:
                yield _event(entry, kind, pod, "")
        elif call in OF_CONTAINERS:
            identifier, name = str(entry.get("container_id", "")), str(entry.get("container", ""))
            of_pod = made.setdefault(pod, {})
            if call == "RemoveContainer":
                of_pod.pop(identifier, None)
            else:
                of_pod[identifier] = name
            yield _event(entry, OF_CONTAINERS[call], identifier, name)


def _event(entry: Entry, kind: int, about: str, container: str) -> api.ContainerEventResponse:
    """`container`: its name; empty when the event is the pod's."""
    namespace, _, name = str(entry.get("pod", "")).rpartition("/")
    # An exit's entry is as late as the server heard of it; it begins when the container ended.
    when = entry["started_at_ns"] if entry["call"] == ENDED else entry.get("ended_at_ns", 0)
    event = api.ContainerEventResponse(
        container_id=about,
        container_event_type=kind,  # type: ignore[arg-type]
        created_at=when,
    )
    event.pod_sandbox_status.id = str(entry.get("pod_id", ""))
    event.pod_sandbox_status.metadata.name = name
    event.pod_sandbox_status.metadata.namespace = namespace
    if container:
        event.containers_statuses.add(id=about).metadata.name = container
    return event
