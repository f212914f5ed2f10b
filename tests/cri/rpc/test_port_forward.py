"""Tests PortForward over WebSocket, from the call to the forwarded bytes; tests/cri/streaming tests
SPDY."""

from __future__ import annotations

import time
from urllib.parse import urlparse

import grpc
import pytest
from websockets.exceptions import ConnectionClosed

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of
from tests.cri.streaming_session import open_session


@pytest.mark.requirement("8.15")
@pytest.mark.parametrize("host_network", [False, True])
def test_ports_are_forwarded(server: Server, host_network: bool) -> None:
    pod = server.run_pod(host_network=host_network)
    server.launch(
        pod, server.container_config(["sh", "-c", "while :; do echo pong | nc -l -p 7070; done"])
    )
    deadline = time.monotonic() + 60
    while not (answer := forwarded(server, pod)).startswith(b"pong"):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


def forwarded(server: Server, pod: str) -> bytes:
    """Return the answer of the pod's port 7070, or the text of the error."""
    url = server.runtime.PortForward(api.PortForwardRequest(pod_sandbox_id=pod, port=[7070])).url
    with open_session(server, url, "v4.channel.k8s.io") as session:
        try:
            session.send(b"\x00" + b"ping")
            while True:
                message = session.recv(2)
                assert isinstance(message, bytes)
                if message[1:] != (7070).to_bytes(2, "little"):  # each channel begins with its port
                    return message[1:]
        except (ConnectionClosed, TimeoutError) as error:  # between two attempts it is closed
            return str(error).encode()


@pytest.mark.requirement("3.7.1", "1.b.8", "4.10.1")
def test_ports_may_come_with_the_streams(server: Server) -> None:
    url = server.runtime.PortForward(api.PortForwardRequest(pod_sandbox_id=server.run_pod())).url
    assert urlparse(url).hostname == "127.0.0.1" and urlparse(url).port


@pytest.mark.requirement("1.a.8", "1.a.1")
def test_invalid_port_forwards_are_refused(server: Server) -> None:
    pod = server.run_pod()
    for port in (0, -1, 65536):
        request = api.PortForwardRequest(pod_sandbox_id=pod, port=[port])
        assert (
            code_of(lambda r=request: server.runtime.PortForward(r))
            == grpc.StatusCode.INVALID_ARGUMENT
        )  # type: ignore[misc]
    server.stop_pod(pod)
    stopped = api.PortForwardRequest(pod_sandbox_id=pod)
    assert (
        code_of(lambda: server.runtime.PortForward(stopped)) == grpc.StatusCode.FAILED_PRECONDITION
    )
    unknown = api.PortForwardRequest(pod_sandbox_id="f" * 64)
    assert code_of(lambda: server.runtime.PortForward(unknown)) == grpc.StatusCode.NOT_FOUND
