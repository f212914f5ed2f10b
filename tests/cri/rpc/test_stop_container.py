"""StopContainer: signals, grace periods and callers that disagree."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


def test_stop_honours_the_signal_and_the_grace_period(server: Server) -> None:
    pod = server.run_pod()
    polite = server.launch(
        pod,
        server.container_config(["sh", "-c", "trap 'exit 5' TERM; echo set; while :; do sleep 0.05; done"]),
    )
    server.wait_logged(polite, "set")
    server.stop_container(polite, 10)
    assert server.status(polite).exit_code == 5
    config = server.container_config(
        ["sh", "-c", "trap '' TERM; echo set; while :; do sleep 0.05; done"],
        metadata=api.ContainerMetadata(name="deaf"),
        log_path="deaf.log",
    )
    deaf = server.launch(pod, config)
    server.wait_logged(deaf, "set")
    started = time.monotonic()
    server.stop_container(deaf, 1)
    assert 0.9 < time.monotonic() - started < 30 and server.status(deaf).exit_code == 137
    for container in (polite, deaf, "0" * 64):
        server.stop_container(container, 1)


def test_a_shorter_stop_wins_over_a_longer_one(server: Server) -> None:
    script = "trap 'echo asked' TERM; echo set; while :; do sleep 0.05; done"
    container = server.launch(server.run_pod(), server.container_config(["sh", "-c", script]))
    server.wait_logged(container, "set")
    with ThreadPoolExecutor() as pool:
        long = pool.submit(server.stop_container, container, 60)
        server.wait_logged(container, "asked")
        started = time.monotonic()
        server.stop_container(container, 0)
        long.result(30)
    assert time.monotonic() - started < 30
