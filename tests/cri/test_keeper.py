"""What the keeper (pause/keeper.c) is for: exit codes after a shim was killed, on every kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from cri_server.api import api_pb2 as api
from pyrunc.kernel.process import alive_since, stat
from tests.cri.server_harness import Server
from tests.cri.test_recovery import nothing_left, pid_of, shim_pid
from tests.cri.test_takeover import at_the_end, lose_shim
from tests.support.keeper import end_keeper, keeper_pid
from tests.support.processes import comm, wait_until

MODULE = "tests.cri.without_exit_info"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(module=MODULE) as server:
        server.load_image()
        yield server


def parent_of(pid: int) -> int:
    found = stat(pid)
    assert found is not None
    return found.parent


def zygote_of_shims(server: Server) -> int:
    (zygote,) = [
        pid
        for pid in server.processes()
        if comm(pid) == "pyrunc-zygote" and parent_of(pid) == keeper_pid(server.state)
    ]
    return zygote


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGKILL, 137)])
def test_the_exit_code_of_a_killed_shims_container(server: Server, number: int, code: int) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 42")))
    server.wait_logged(container, "ready")
    assert parent_of(pid_of(server, container)) == shim_pid(server, pod)
    lose_shim(server, pod)
    assert parent_of(pid_of(server, container)) == keeper_pid(server.state)
    os.kill(pid_of(server, container), number)
    status = server.wait_exit(container)
    assert (status.state, status.exit_code) == (api.CONTAINER_EXITED, code)
    server.remove_all()
    nothing_left(server)


def test_a_killed_keeper_costs_at_most_a_code_of_its_own_time(server: Server) -> None:
    """Of a container whose shim is killed after the keeper: init reaps it, and the kernel does not tell. Pods of the next shims are as
    before."""
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 42")))
    server.wait_logged(container, "ready")
    zygote = zygote_of_shims(server)
    end_keeper(server.state, signal.SIGKILL)
    assert wait_until(lambda: alive_since(zygote) is None and keeper_pid(server.state), 30), server.tail()
    assert parent_of(zygote_of_shims(server)) == keeper_pid(server.state)
    lose_shim(server, pod)
    assert server.output(container, "echo", "on") == "on\n"
    server.stop_container(container, 30)
    # 42 if the shim sees the zombie before init reaps it.
    assert server.status(container).exit_code in (255, 42)
    other = server.launch(pod, server.container_config(at_the_end("exit 43"), metadata={"name": "other"}))
    server.wait_logged(other, "ready")
    lose_shim(server, pod)
    server.stop_container(other, 30)
    assert server.status(other).exit_code == 43, "the next shims are below the new keeper"
    server.remove_all()
    nothing_left(server)


def test_a_keeper_survives_the_server_and_its_zygote_does_not(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 42")))
    server.wait_logged(container, "ready")
    keeper, zygote = keeper_pid(server.state), zygote_of_shims(server)
    server.kill()
    assert wait_until(lambda: alive_since(zygote) is None, 30)
    server.start()
    assert keeper_pid(server.state) == keeper
    lose_shim(server, pod)
    os.kill(pid_of(server, container), signal.SIGTERM)
    assert server.wait_exit(container).exit_code == 42
    server.remove_all()
    nothing_left(server)
    server.stop()
    assert wait_until(lambda: not keeper_pid(server.state), 30), "nothing is left to keep"
