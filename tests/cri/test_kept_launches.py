"""A command that is executed again and again: what was made for it once does as well as what is made anew.

These hold without `pyrunc.accelerate` too, but for the one that looks at what is kept.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        server.load_image()
        yield server


@pytest.fixture
def container(server: Server) -> Iterator[str]:
    yield server.launch(server.run_pod(), server.container_config())
    server.remove_all()


def kept(server: Server) -> int:
    """Launches that the server has open."""
    found = 0
    for link in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(link).startswith("/memfd:pyrunc:program")
    return found


def test_the_second_time_it_is_kept(server: Server, container: str) -> None:
    pytest.importorskip("pyrunc.accelerate.kept_launches")
    found = []
    for _ in range(4):
        server.exec(container, "true")
        found.append(kept(server))
    assert found == [0, 1, 1, 1]
    server.remove_container(container)
    assert kept(server) == 0


def test_each_time_it_runs_anew(server: Server, container: str) -> None:
    for number in range(1, 5):
        answer = server.exec(container, "sh", "-c", "echo >> /count; wc -l < /count; exit 3")
        assert (answer.stdout, answer.exit_code) == (b"%d\n" % number, 3)


def test_several_at_once(server: Server, container: str) -> None:
    answers: list[bytes] = []

    def probe() -> None:
        for _ in range(8):
            answers.append(server.exec(container, "sh", "-c", "echo $$ $PPID; cat").stdout)

    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 32 and len(set(answers)) == 32, "each is a process of its own, with its own pid"


def test_an_update_is_seen(server: Server, container: str) -> None:
    read = ("cat", "/proc/self/oom_score_adj")
    before = {server.output(container, *read) for _ in range(3)}
    limits = api.LinuxContainerResources(oom_score_adj=int(before.copy().pop()) + 7)
    server.runtime.UpdateContainerResources(
        api.UpdateContainerResourcesRequest(container_id=container, linux=limits), timeout=30
    )
    assert {server.output(container, *read) for _ in range(3)} == {f"{limits.oom_score_adj}\n"}


def test_a_program_that_is_gone_and_comes_back(server: Server, container: str) -> None:
    server.output(container, "sh", "-c", "printf '#!/bin/sh\\necho here\\n' > /probe; chmod +x /probe")
    for _ in range(3):
        assert server.output(container, "/probe") == "here\n"
    server.output(container, "mv", "/probe", "/away")
    for _ in range(3):
        with pytest.raises(grpc.RpcError, match="/probe"):
            server.exec(container, "/probe")
    server.output(container, "mv", "/away", "/probe")
    assert server.output(container, "/probe") == "here\n"


def test_a_container_of_the_same_name_has_its_own(server: Server) -> None:
    pod = server.run_pod()
    for number in range(2):
        config = server.container_config(envs=[api.KeyValue(key="WHO", value=b"%d" % number)])
        container = server.launch(pod, config)
        for _ in range(3):
            assert server.output(container, "sh", "-c", "echo $WHO") == f"{number}\n"
        server.stop_container(container)
        server.remove_container(container)
    server.remove_all()
