"""Exec, attach and port-forward from the CRI call to the bytes, over WebSocket (SPDY is tested with the streaming server)."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any
from urllib.parse import urlparse

import grpc
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from cri_server.api import api_pb2 as api
from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.kernel.namespace import setns
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until

STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255


def open_session(server: Server, url: str, protocol: str = "v5.channel.k8s.io") -> ClientConnection:
    """Connect to the server's loopback, which is in its network namespace."""
    place: dict[str, Any] = {}

    def dial() -> None:
        namespace = os.open(f"/proc/{server.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(namespace, CLONE_NEWNET)
        finally:
            os.close(namespace)
        address = urlparse(url)
        place["socket"] = socket.create_connection((address.hostname, address.port), 30)

    thread = threading.Thread(target=dial)
    thread.start()
    thread.join()
    return connect(
        url.replace("http", "ws", 1),
        sock=place["socket"],
        subprotocols=[Subprotocol(protocol)],
        compression=None,
        proxy=None,
    )


def collect(session: ClientConnection) -> tuple[bytes, bytes, dict[str, Any]]:
    """stdout, stderr and the final Status."""
    content: dict[int, bytearray] = {STDOUT: bytearray(), STDERR: bytearray(), ERROR: bytearray()}
    for message in session:
        data = message if isinstance(message, bytes) else message.encode()
        if data and data[0] in content:
            content[data[0]] += data[1:]
    return bytes(content[STDOUT]), bytes(content[STDERR]), json.loads(bytes(content[ERROR]) or b"{}")


def exec_url(server: Server, container: str, *command: str, **streams: bool) -> str:
    request = api.ExecRequest(container_id=container, cmd=command, **streams)
    return str(server.runtime.Exec(request).url)


def test_exec(server: Server) -> None:
    container = server.launch(server.run_pod())
    url = exec_url(
        server, container, "sh", "-c", "cat; echo e >&2; exit 9", stdin=True, stdout=True, stderr=True
    )
    with open_session(server, url) as session:
        session.send(bytes([STDIN]) + b"hello")
        session.send(bytes([CLOSE, STDIN]))
        stdout, stderr, status = collect(session)
    assert (stdout, stderr) == (b"hello", b"e\n")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "9"}]


def test_an_exec_dies_with_its_client(server: Server) -> None:
    container = server.launch(server.run_pod())
    with open_session(server, exec_url(server, container, "sleep", "4321", stdout=True)):
        assert wait_until(lambda: "sleep 4321" in server.output(container, "ps"), 60)
    assert wait_until(lambda: "sleep 4321" not in server.output(container, "ps"), 60)


def test_attach_sees_what_comes_and_feeds_stdin(server: Server) -> None:
    config = server.container_config(
        ["sh", "-c", "echo before; while read line; do echo got $line; done; echo over"],
        stdin=True,
        stdin_once=True,
    )
    container = server.launch(server.run_pod(), config)
    server.wait_logged(container, "before")
    url = server.runtime.Attach(api.AttachRequest(container_id=container, stdin=True, stdout=True)).url
    with open_session(server, url) as session:
        session.send(bytes([STDIN]) + b"one\n")
        session.send(bytes([CLOSE, STDIN]))
        stdout, _, _ = collect(session)
    assert stdout == b"got one\nover\n"
    assert server.wait_exit(container).exit_code == 0
    assert server.log_lines(container) == ["before", "got one", "over"]


def test_leaving_an_attach_changes_nothing(server: Server) -> None:
    container = server.launch(
        server.run_pod(), server.container_config(["sh", "-c", "while :; do echo t; sleep 0.05; done"])
    )
    for _ in range(3):
        url = server.runtime.Attach(api.AttachRequest(container_id=container, stdout=True)).url
        with open_session(server, url) as session:
            assert b"t" in next(m for m in iter(session.recv, None) if len(m) > 1)  # type: ignore[arg-type,operator]
    assert server.status(container).state == api.CONTAINER_RUNNING


@pytest.mark.parametrize("host_network", [False, True])
def test_ports_are_forwarded(server: Server, host_network: bool) -> None:
    pod = server.run_pod(host_network=host_network)
    server.launch(pod, server.container_config(["sh", "-c", "while :; do echo pong | nc -l -p 7070; done"]))
    deadline = time.monotonic() + 60
    while not (answer := forwarded(server, pod)).startswith(b"pong"):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


def forwarded(server: Server, pod: str) -> bytes:
    """What port 7070 says, or why it does not: between two connections nobody listens there."""
    url = server.runtime.PortForward(api.PortForwardRequest(pod_sandbox_id=pod, port=[7070])).url
    with open_session(server, url, "v4.channel.k8s.io") as session:
        try:
            session.send(b"\x00" + b"ping")
            while True:
                message = session.recv(2)
                assert isinstance(message, bytes)
                if message[1:] != (7070).to_bytes(2, "little"):  # each channel begins with its port
                    return message[1:]
        except (ConnectionClosed, TimeoutError) as error:
            return str(error).encode()


def test_a_url_works_once(server: Server) -> None:
    container = server.launch(server.run_pod())
    url = exec_url(server, container, "true", stdout=True)
    with open_session(server, url) as session:
        collect(session)
    with pytest.raises(Exception, match="404"):
        open_session(server, url)
    gone = exec_url(server, container, "true", stdout=True)
    server.stop_container(container)
    assert (
        code_of(lambda: exec_url(server, container, "true", stdout=True))
        == grpc.StatusCode.FAILED_PRECONDITION
    )
    with open_session(server, gone) as session:
        assert "is not running" in collect(session)[2]["message"]
