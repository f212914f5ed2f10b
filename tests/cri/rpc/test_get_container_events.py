"""GetContainerEvents: each change of a pod or a container, once, in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import RPC_TIMEOUT_S, Server
from tests.support.processes import wait_until


def test_events_follow_a_life(server: Server) -> None:
    stream = server.runtime.GetContainerEvents(api.GetEventsRequest(), timeout=RPC_TIMEOUT_S)
    seen: list[tuple[str, int]] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: seen.extend((e.container_id, e.container_event_type) for e in stream))
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
    """The id of a pod that was there for a moment: whoever hears of it hears of those that come."""
    pod = server.run_pod()
    server.remove_pod(pod)
    return pod
