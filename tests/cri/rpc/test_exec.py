"""Tests Exec over WebSocket, from the call to the streamed bytes; tests/cri/streaming tests
SPDY."""

from __future__ import annotations

import grpc
import pytest

from tests.cri.server_harness import Server, code_of
from tests.cri.streaming_session import CLOSE, STDIN, collect, exec_url, open_session
from tests.support.processes import wait_until


@pytest.mark.requirement("9.10")
def test_exec_returns_a_url_for_the_session(server: Server) -> None:
    container = server.launch(server.run_pod())
    url = exec_url(
        server,
        container,
        "sh",
        "-c",
        "cat; echo e >&2; exit 9",
        stdin=True,
        stdout=True,
        stderr=True,
    )
    with open_session(server, url) as session:
        session.send(bytes([STDIN]) + b"hello")
        session.send(bytes([CLOSE, STDIN]))
        stdout, stderr, status = collect(session)
    assert (stdout, stderr) == (b"hello", b"e\n")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "9"}]


def test_an_exec_ends_when_its_client_disconnects(server: Server) -> None:
    container = server.launch(server.run_pod())
    with open_session(server, exec_url(server, container, "sleep", "4321", stdout=True)):
        assert wait_until(lambda: "sleep 4321" in server.output(container, "ps"), 60)
    assert wait_until(lambda: "sleep 4321" not in server.output(container, "ps"), 60)


@pytest.mark.requirement("4.10.2", "9.1")
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
