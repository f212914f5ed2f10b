"""A shim that is killed costs nothing: another one goes on with its pod, for the server has what is needed (`pyrunc.shim.kept`)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from pyrunc.kernel.process import alive_since
from tests.cri.server_harness import Server, code_of
from tests.cri.test_recovery import nothing_left, pid_of, shim_pid
from tests.support.processes import wait_until


def at_the_end(script: str) -> list[str]:
    """Does this when it is told to end, of which it says when it will."""
    return ["sh", "-c", f"trap '{script}' TERM; echo ready; sleep 1000 & wait"]


COUNTS = ["sh", "-c", "i=0; while true; do echo $i; i=$((i+1)); usleep 1000; done"]


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server() as server:
        server.load_image()
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server() as server:
        server.load_image()
        yield server


def lose_shim(server: Server, pod: str) -> int:
    """Kill the pod's shim; the pid of the one that took over."""
    lost = shim_pid(server, pod)
    os.kill(lost, signal.SIGKILL)
    assert wait_until(lambda: shim_pid(server, pod) != lost, 30), server.tail()
    wait_for_it(server, pod)
    return shim_pid(server, pod)


def wait_for_it(server: Server, pod: str) -> None:
    shown = f"sandbox {pod}: another shim has taken over"
    assert wait_until(lambda: shown in server.tail(1000), 30), server.tail()


def test_containers_run_on_and_tell_their_exit_code(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 7")))
    server.wait_logged(container, "ready")
    process = pid_of(server, container)
    lose_shim(server, pod)
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert pid_of(server, container) == process
    assert server.pod_status(pod).state == api.SANDBOX_READY
    assert server.output(container, "echo", "here") == "here\n"
    server.stop_container(container, 30)
    status = server.status(container)
    assert (status.exit_code, status.reason) == (7, "Error")
    server.remove_all()
    nothing_left(server)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), 137),
        (lambda pid: os.kill(pid, signal.SIGTERM), 143),
    ],
)
def test_an_end_by_a_signal(server: Server, end: Callable[[int], None], code: int) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 143")))
    server.wait_logged(container, "ready")
    lose_shim(server, pod)
    end(pid_of(server, container))
    assert server.wait_exit(container).exit_code == code
    server.remove_all()


def test_no_line_of_the_log_is_missing_or_twice(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(command=COUNTS))
    for _ in range(3):
        so_far = len(server.log_lines(container))
        assert wait_until(lambda n=so_far: len(server.log_lines(container)) > n + 50, 30)  # type: ignore[misc]
        lose_shim(server, pod)
    so_far = len(server.log_lines(container))
    assert wait_until(lambda: len(server.log_lines(container)) > so_far + 50, 30)
    server.stop_container(container)
    lines = server.log_lines(container)
    assert lines == [str(number) for number in range(len(lines))]
    server.remove_all()


def test_a_terminal_is_handed_over(server: Server) -> None:
    pod = server.run_pod()
    config = server.container_config(command=["cat"])
    config.tty = config.stdin = True
    container = server.launch(pod, config)
    lose_shim(server, pod)
    assert server.status(container).state == api.CONTAINER_RUNNING
    terminal = os.open(f"/proc/{pid_of(server, container)}/fd/0", os.O_RDWR | os.O_NOCTTY)
    os.write(terminal, b"written\n")
    os.close(terminal)
    assert wait_until(lambda: "written" in "".join(server.log_lines(container)), 30)
    server.stop_container(container)
    server.remove_all()


def test_the_network_goes_with_the_pod(server: Server) -> None:
    """Its namespace is at another path now, which the end of the pod and another container use."""
    pod = server.run_pod()
    first = server.launch(pod)
    address = server.pod_status(pod).network.ip
    lose_shim(server, pod)
    config = server.container_config(log_path="second.log")
    config.metadata.name = "second"
    second = server.launch(pod, config)
    assert address in server.output(second, "ip", "addr")
    assert server.output(first, "ip", "addr") == server.output(second, "ip", "addr")
    assert server.output(second, "df", "/dev/shm") == server.output(first, "df", "/dev/shm")
    server.stop_pod(pod)
    assert server.status(first).exit_code == 137
    server.remove_all()
    nothing_left(server)


def test_a_session_of_the_lost_shim_is_ended(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    with ThreadPoolExecutor(1) as pool:
        executing = pool.submit(code_of, lambda: server.exec(container, "sh", "-c", "sleep 1005 & wait"))
        assert wait_until(lambda: "1005" in server.output(container, "ps"), 30)
        lose_shim(server, pod)
        assert executing.result(30) == grpc.StatusCode.UNAVAILABLE
    assert wait_until(lambda: "1005" not in server.output(container, "ps"), 30)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()


def test_a_container_that_ends_while_there_is_no_shim(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("echo last; exit 9")))
    server.wait_logged(container, "ready")
    process, shim = pid_of(server, container), shim_pid(server, pod)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        os.kill(shim, signal.SIGKILL)
        os.kill(process, signal.SIGTERM)
        assert wait_until(lambda: alive_since(process) is None, 30)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert server.wait_exit(container).exit_code == 9
    assert server.log_lines(container) == ["ready", "last"]
    server.remove_all()


def test_a_created_container_is_started_by_the_next_shim(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod)
    lose_shim(server, pod)
    server.start_container(container)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()


def test_a_restarted_server_can_do_it_too(own_server: Server) -> None:
    server = own_server
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(command=COUNTS))
    process = pid_of(server, container)
    server.restart()
    assert wait_until(lambda: copies_of(server.pid, process), 30)
    lose_shim(server, pod)
    server.restart()  # it finds the new shim by the new record
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.stop_container(container)
    lines = server.log_lines(container)
    assert lines == [str(number) for number in range(len(lines))]
    server.remove_all()
    nothing_left(server)


def copies_of(holder: int, process: int) -> bool:
    """Whether `holder` has a pidfd of the process."""
    for file in Path(f"/proc/{holder}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if f"Pid:\t{process}\n" in file.read_text():
                return True
    return False


def test_what_is_kept_is_closed_in_the_end(server: Server) -> None:
    def life() -> int:
        pod = server.run_pod()
        server.stop_container(server.launch(pod))
        server.remove_pod(pod)
        return len(os.listdir(f"/proc/{server.pid}/fd"))

    life()
    before = life()
    assert wait_until(lambda: life() <= before, 30)


def test_all_shims_at_once(server: Server) -> None:
    pods = [server.run_pod() for _ in range(4)]
    containers = [server.launch(pod) for pod in pods]
    lost = [shim_pid(server, pod) for pod in pods]
    for shim in lost:
        os.kill(shim, signal.SIGKILL)
    for pod in pods:
        wait_for_it(server, pod)
    assert {server.status(container).state for container in containers} == {api.CONTAINER_RUNNING}
    server.remove_all()
    nothing_left(server)
