"""Tests a server that starts over pods of the version before, which had a shim for each pod and no
keeper: today's shims take over the running pods, and the earlier shims end."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, server_fixture
from tests.cri.test_recovery import nothing_left, shim_pid
from tests.cri.test_upgrade import COUNTS, ENDS, feed, reading, wait_until_moved
from tests.support.keeper import is_gone, keeper_pid
from tests.support.processes import wait_until

EARLIER, THIS = "tests.cri.earlier_version", "cri_server.cli.main"
BEFORE_6_15 = "tests.cri.without_exit_info"


server = server_fixture("function", module=EARLIER)


def upgrade(server: Server, module: str = THIS) -> None:
    """Kill the server of the version before, and start today's server over its pods."""
    server.kill()
    # The version before has no such folder. The shims in it end without their server, and remove
    # their files meanwhile.
    folder = server.state / "shims"
    assert wait_until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists(), 10)
    assert not keeper_pid(server.state)
    server.module = module
    server.start()


def test_the_stand_in_leaves_what_the_version_before_left(server: Server) -> None:
    pods = [server.run_pod() for _ in range(2)]
    container = server.launch(pods[0])
    assert len({shim_pid(server, pod) for pod in pods}) == 2, "each pod has its shim"
    assert {file.name for file in (server.state / "sandboxes" / pods[0]).iterdir()} == {
        *("holder.json", "shim.json", "shim.log", "shim.sock"),
    }
    assert {file.name for file in (server.state / "containers" / container).iterdir()} == {
        *("config.json", "launch.json", "state.json"),
    }


@pytest.mark.parametrize("module", [THIS, BEFORE_6_15])
def test_pods_of_earlier_shims_move_while_they_run(server: Server, module: str) -> None:
    pods = [server.run_pod() for _ in range(3)]
    counting = [server.launch(pod, server.container_config(COUNTS)) for pod in pods]
    ends = server.launch(pods[0], _named(server, ENDS, "ends"))
    ended = server.launch(pods[0], _named(server, ["sh", "-c", "exit 3"], "ended"))
    created = server.create(pods[1], _named(server, ["sleep", "1000"], "created"))
    terminal = _named(server, ["sh"], "terminal")
    terminal.tty = terminal.stdin = True
    shell = server.launch(pods[2], terminal)
    reader = reading(server)
    reader.metadata.name = "reading"
    reads = server.launch(pods[2], reader)
    server.wait_logged(ends, "ready")
    assert server.wait_exit(ended).exit_code == 3
    earlier, first = [shim_pid(server, pod) for pod in pods], _starts(server, counting)
    upgrade(server, module)
    wait_until_moved(server, pods)
    assert not {shim_pid(server, pod) for pod in pods} & set(earlier)
    assert _starts(server, counting) == first, "they are the same processes"
    assert server.status(ended).exit_code == 3
    server.start_container(created)
    for container in (*counting, created, shell):
        assert server.output(container, "echo", "here") == "here\n"
    if module == THIS:
        feed(server, reads)
    else:  # the stopped shim has a writing end, too, so the container's input does not end
        assert server.status(reads).state == api.CONTAINER_RUNNING
    server.stop_container(ends, 10)
    assert server.status(ends).exit_code == 7
    server.restart()
    for container in counting:
        assert server.output(container, "echo", "here") == "here\n"
        server.stop_container(container)
        numbers = [int(line) for line in server.log_lines(container)]
        assert numbers == list(range(len(numbers)))
    server.remove_all()
    assert wait_until(lambda: all(map(is_gone, earlier)), 30)
    assert not (server.state / "earlier-shims").exists()
    nothing_left(server)


@pytest.mark.parametrize("module", [THIS, BEFORE_6_15])
def test_exits_around_the_move_are_known(server: Server, module: str) -> None:
    """The exit codes and output of containers that end before, while and after their shim is
    replaced are known."""
    pods = [server.run_pod() for _ in range(2)]
    codes = {}
    for number in range(30):
        command = ["sh", "-c", f"sleep 2.{number * 3:02}; echo bye; exit {number + 1}"]
        container = server.launch(pods[number % 2], _named(server, command, f"c{number}"))
        codes[container] = number + 1
    upgrade(server, module)
    for container, code in codes.items():
        assert server.wait_exit(container).exit_code == code
        assert server.log_lines(container) == ["bye"]
    server.remove_all()
    nothing_left(server)


def test_a_stopped_earlier_shim_ends_when_its_pod_has_ended_without_a_server(
    server: Server,
) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(ENDS))
    server.wait_logged(container, "ready")
    earlier = shim_pid(server, pod)
    upgrade(server, BEFORE_6_15)
    wait_until_moved(server, [pod])
    server.kill()
    assert not is_gone(earlier)
    for process in children(earlier):
        os.kill(process, signal.SIGTERM)
    assert wait_until(lambda: all(map(is_gone, children(earlier))), 30)
    server.start()
    assert server.status(container).exit_code == 7
    assert wait_until(lambda: is_gone(earlier), 30)
    assert not (server.state / "earlier-shims").exists()


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process, including zombies."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_pods_stay_with_their_shim_while_no_keeper_can_be_started(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(ENDS))
    server.wait_logged(container, "ready")
    earlier = shim_pid(server, pod)
    lock = Path(server.state / "keeper.lock")
    lock.mkdir()
    upgrade(server)
    line = f"sandbox {pod}: cannot replace its shim of an earlier version"
    assert wait_until(lambda: line in server.tail(1000), 30)
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert shim_pid(server, pod) == earlier
    lock.rmdir()
    wait_until_moved(server, [pod])
    server.stop_container(container, 10)
    assert server.status(container).exit_code == 7


def _starts(server: Server, containers: list[str]) -> list[int]:
    return [server.status(container).started_at for container in containers]


def _named(server: Server, command: list[str], name: str) -> api.ContainerConfig:
    config = server.container_config(command, log_path=f"{name}.log")
    config.metadata.name = name
    return config
