"""StopContainer: signals, grace periods and concurrent callers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.rpc.images import pull, remove
from tests.cri.server_harness import Server
from tests.support.registry import Registry


@pytest.mark.requirement("4.3.1", "4.3.2", "4.3.5")
def test_stop_honours_the_signal_and_the_grace_period(server: Server) -> None:
    pod = server.run_pod()
    polite = server.launch(
        pod,
        server.container_config(
            ["sh", "-c", "trap 'exit 5' TERM; echo set; while :; do sleep 0.05; done"]
        ),
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


@pytest.mark.requirement("4.3.3")
def test_a_stop_with_a_shorter_grace_period_ends_a_longer_stop(server: Server) -> None:
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


@pytest.mark.requirement("4.3.1", "4.1.9")
def test_the_signal_of_the_request_comes_before_the_images(
    server: Server, registry: Registry
) -> None:
    script = (
        "trap 'exit 1' TERM; trap 'exit 2' USR1; trap 'exit 3' USR2; echo set; while :; do sleep"
        " 0.05; done"
    )
    layers, settings = build.busybox().layers, {"Env": ["PATH=/bin"], "StopSignal": "SIGUSR2"}
    registry.push("signals/app:v1", build.image(layers, settings))
    identifier = pull(server, f"{registry.host}/signals/app:v1")
    pod = server.run_pod()
    for name, stop_signal, code in (("image", 0, 3), ("request", api.SIGNAL_SIGUSR1, 2)):
        config = server.container_config(
            ["sh", "-c", script],
            image=api.ImageSpec(image=identifier),
            log_path=f"{name}.log",
            stop_signal=stop_signal,
        )
        config.metadata.name = name
        container = server.launch(pod, config)
        server.wait_logged(container, "set")
        server.stop_container(container, 30)
        assert server.status(container).exit_code == code, name
        server.remove_container(container)
    remove(server, identifier)


@pytest.mark.requirement("4.3.2", "1.a.2")
def test_a_stop_does_not_change_a_container_that_does_not_run(server: Server) -> None:
    container = server.create(server.run_pod())
    server.stop_container(container, 5)
    assert server.status(container).state == api.CONTAINER_CREATED
    server.start_container(container)
    server.stop_container(container)
    ended = server.status(container)
    server.stop_container(container, 5)
    assert server.status(container) == ended
    server.stop_container("f" * 64, 5)
