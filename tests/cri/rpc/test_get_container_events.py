"""GetContainerEvents: each change of a pod or a container, once, in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import RPC_TIMEOUT_S, Server
from tests.support.processes import wait_until


@pytest.mark.requirement("13.8")
def test_each_change_of_a_pods_life_is_an_event(server: Server) -> None:
    stream = server.runtime.GetContainerEvents(api.GetEventsRequest(), timeout=RPC_TIMEOUT_S)
    seen: list[tuple[str, int]] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(
            lambda: seen.extend((e.container_id, e.container_event_type) for e in stream)
        )
        assert wait_until(lambda: _herald(server) in (about for about, _ in seen), 60)
        pod = server.run_pod()
        container = server.launch(pod, server.container_config(["true"]))
        server.wait_exit(container)
        server.remove_container(container)
        server.stop_pod(pod)
        server.remove_pod(pod)
        assert wait_until(lambda: (pod, api.CONTAINER_DELETED_EVENT) in seen, 60)
        stream.cancel()
        assert isinstance(reading.exception(30), grpc.RpcError)
    of_container = [kind for about, kind in seen if about == container]
    assert of_container == [0, 1, 2, 3]
    of_pod = [kind for about, kind in seen if about == pod]
    assert of_pod == [0, 1, 2, 3], (
        "each once, the stop too, which the exit of its pause process tells of as well"
    )


def _herald(server: Server) -> str:
    """Run and remove a pod; return its id."""
    pod = server.run_pod()
    server.remove_pod(pod)
    return pod


@pytest.mark.requirement("10.3.1", "10.3.2", "10.3.3", "4.2.2")
def test_each_subscriber_gets_events_of_visible_states(server: Server) -> None:
    """The second of two subscribers gets only events after its subscription. The statuses in an
    event have the state that the event reports."""
    first: list[api.ContainerEventResponse] = []
    second: list[api.ContainerEventResponse] = []
    streams = []

    def subscribe(received: list[api.ContainerEventResponse]) -> None:
        stream = server.runtime.GetContainerEvents(api.GetEventsRequest(), timeout=RPC_TIMEOUT_S)
        streams.append(stream)
        pool.submit(lambda: received.extend(stream))
        # A subscriber that gets the events of such a pod gets all later ones.
        assert wait_until(lambda: _herald(server) in [event.container_id for event in received], 60)

    with ThreadPoolExecutor(2) as pool:
        subscribe(first)
        pod = server.run_pod()
        container = server.launch(pod)
        subscribe(second)
        server.stop_container(container)
        server.remove_pod(pod)
        for received in (first, second):
            assert wait_until(
                lambda received=received: (
                    (pod, 3) in [(e.container_id, e.container_event_type) for e in received]
                ),
                60,  # type: ignore[misc]
            )
        for stream in streams:
            stream.cancel()
    about = [e for e in first if e.pod_sandbox_status.id == pod]
    assert all(e.pod_sandbox_status.metadata.name for e in first)
    assert [e.created_at for e in first] == sorted({e.created_at for e in first}), "later and later"
    (started,) = [e for e in about if (e.container_id, e.container_event_type) == (container, 1)]
    (stopped,) = [e for e in about if (e.container_id, e.container_event_type) == (container, 2)]
    assert [(s.id, s.state) for s in started.containers_statuses] == [
        (container, api.CONTAINER_RUNNING)
    ]
    assert [(s.id, s.state) for s in stopped.containers_statuses] == [
        (container, api.CONTAINER_EXITED)
    ]
    later = [
        (e.container_id, e.container_event_type) for e in second if e.pod_sandbox_status.id == pod
    ]
    assert later == [
        (e.container_id, e.container_event_type)
        for e in about
        if e.created_at >= stopped.created_at
    ]
