"""Tests Attach over WebSocket, from the call to the streamed bytes; tests/cri/streaming tests
SPDY."""

from __future__ import annotations

from urllib.parse import urlparse

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of
from tests.cri.streaming_session import CLOSE, STDIN, collect, open_session


@pytest.mark.requirement("9.8")
def test_attach_gets_new_output_and_feeds_stdin(server: Server) -> None:
    config = server.container_config(
        ["sh", "-c", "echo before; while read line; do echo got $line; done; echo over"],
        stdin=True,
        stdin_once=True,
    )
    container = server.launch(server.run_pod(), config)
    server.wait_logged(container, "before")
    url = server.runtime.Attach(
        api.AttachRequest(container_id=container, stdin=True, stdout=True)
    ).url
    with open_session(server, url) as session:
        session.send(bytes([STDIN]) + b"one\n")
        session.send(bytes([CLOSE, STDIN]))
        stdout, _, _ = collect(session)
    assert stdout == b"got one\nover\n"
    assert server.wait_exit(container).exit_code == 0
    assert server.log_lines(container) == ["before", "got one", "over"]


@pytest.mark.requirement("9.8")
def test_leaving_an_attach_changes_nothing(server: Server) -> None:
    container = server.launch(
        server.run_pod(),
        server.container_config(["sh", "-c", "while :; do echo t; sleep 0.05; done"]),
    )
    for _ in range(3):
        url = server.runtime.Attach(api.AttachRequest(container_id=container, stdout=True)).url
        with open_session(server, url) as session:
            assert b"t" in next(m for m in iter(session.recv, None) if len(m) > 1)  # type: ignore[arg-type,operator]
    assert server.status(container).state == api.CONTAINER_RUNNING


@pytest.mark.requirement("4.10.1", "4.10.2", "1.b.8")
def test_invalid_attach_requests_get_no_url(server: Server) -> None:
    container = server.create(server.run_pod())
    good = api.AttachRequest(container_id=container, stdout=True)
    assert code_of(lambda: server.runtime.Attach(good)) == grpc.StatusCode.FAILED_PRECONDITION
    server.start_container(container)
    for streams in ({}, {"tty": True, "stdout": True, "stderr": True}):
        wrong = api.AttachRequest(container_id=container, **streams)
        assert code_of(lambda w=wrong: server.runtime.Attach(w)) == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[misc]
    url = urlparse(server.runtime.Attach(good).url)
    assert (url.scheme, url.hostname) == ("http", "127.0.0.1") and url.port
