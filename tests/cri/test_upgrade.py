"""Tests that a server of another version starts over running pods: shims of that version take over
the pods, and no process of the pods ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, server_fixture
from tests.cri.streaming_session import CLOSE, STDIN, collect, open_session
from tests.cri.test_recovery import nothing_left, shim_pid
from tests.cri.test_shared_shims import shims
from tests.support.processes import wait_until

OTHER, THIS = "tests.cri.other_version", "cri_server.cli.main"
COUNTS = ["sh", "-c", "i=0; while true; do echo $i; i=$((i+1)); usleep 20000; done"]
ENDS = ["sh", "-c", "trap 'exit 7' TERM; echo ready; sleep 1000 & wait"]


server = server_fixture("function", module=OTHER)


@pytest.mark.parametrize("how", [Server.kill, Server.stop], ids=["killed", "stopped"])
def test_pods_move_to_shims_of_the_new_version(server: Server, how: object) -> None:
    pods = [server.run_pod() for _ in range(3)]
    counting = [server.launch(pod, server.container_config(COUNTS)) for pod in pods]
    ends = server.launch(pods[0], _named(server, ENDS, "ends"))
    created = server.create(pods[1], _named(server, ["sleep", "1000"], "created"))
    server.wait_logged(ends, "ready")
    before, first = shims(server), [server.status(c).started_at for c in counting]
    server.module = THIS
    server.restart(how)  # type: ignore[arg-type]
    assert wait_until(lambda: {shim_pid(server, pod) for pod in pods} <= shims(server) - before, 30)
    wait_until_moved(server, pods)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), 30)
    for container in counting:
        assert server.status(container).state == api.CONTAINER_RUNNING
        assert server.output(container, "echo", "here") == "here\n"
    assert [server.status(c).started_at for c in counting] == first, "they are the same processes"
    server.start_container(created)
    server.stop_container(ends, 10)
    assert server.status(ends).exit_code == 7
    for container in counting:
        server.stop_container(container)
        numbers = [int(line) for line in server.log_lines(container)]
        assert numbers == list(range(len(numbers)))
    server.remove_all()
    nothing_left(server)


def test_the_previous_version_takes_running_pods_back(server: Server) -> None:
    server.module = THIS
    server.restart()
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(ENDS))
    server.wait_logged(container, "ready")
    before = shims(server)
    server.module = OTHER
    server.restart()
    assert wait_until(lambda: not shims(server) & before, 30)
    wait_until_moved(server, [pod])
    server.stop_container(container, 10)
    assert server.status(container).exit_code == 7
    server.remove_all()
    nothing_left(server)


@pytest.mark.parametrize("kind", ["sandboxes", "containers"])
def test_a_record_of_a_newer_version_is_refused_and_its_pod_runs_on(
    server: Server, kind: str
) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    server.stop()
    (record,) = (server.root / kind).glob("*.json")
    own = record.read_text()
    record.write_text(json.dumps({**json.loads(own), "version": 2}))
    words = f"a newer version of pyrunc-cri has written {record}: version 2 is not one of 1..1"
    with pytest.raises(AssertionError, match=words):
        server.start()
    assert record.exists() and (server.state / "sandboxes" / pod / "shim.sock").exists()
    record.write_text(own)
    server.start()
    assert server.output(container, "echo", "here") == "here\n"


def test_the_stdin_of_a_container_survives_the_move(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, reading(server))
    server.module = THIS
    server.restart()
    wait_until_moved(server, [pod])
    feed(server, container)


def test_the_beginning_of_a_line_survives_the_move(server: Server) -> None:
    pod = server.run_pod()
    script = "trap 'echo end; exit' TERM; printf begin-; echo ready >&2; sleep 1000 & wait"
    container = server.launch(pod, server.container_config(["sh", "-c", script]))
    server.wait_logged(container, "ready")
    server.module = THIS
    server.restart()
    wait_until_moved(server, [pod])
    server.stop_container(container, 10)
    log = Path(server.status(container).log_path).read_text()
    records = [line.split(" ", 1)[1] for line in log.splitlines()]
    assert records == ["stderr F ready", "stdout P begin-", "stdout F end"]


def reading(server: Server) -> api.ContainerConfig:
    """Return the configuration of a container without a terminal that prints the lines of its
    stdin."""
    command = ["sh", "-c", "while read line; do echo got $line; done; echo over"]
    return server.container_config(command, stdin=True, stdin_once=True, log_path="reading.log")


def feed(server: Server, container: str) -> None:
    """Send a line and the end of stdin to a container of `reading`, which then ends."""
    assert server.status(container).state == api.CONTAINER_RUNNING
    request = api.AttachRequest(container_id=container, stdin=True, stdout=True)
    with open_session(server, server.runtime.Attach(request).url) as session:
        session.send(bytes([STDIN]) + b"one\n")
        session.send(bytes([CLOSE, STDIN]))
        assert collect(session)[0] == b"got one\nover\n"
    assert server.wait_exit(container).exit_code == 0
    assert server.log_lines(container) == ["got one", "over"]


def wait_until_moved(server: Server, pods: list[str]) -> None:
    for pod in pods:
        line = f"sandbox {pod}: another shim has taken over"
        assert wait_until(lambda text=line: text in server.tail(1000), 30)  # type: ignore[misc]


def _named(server: Server, command: list[str], name: str) -> api.ContainerConfig:
    config = server.container_config(command, log_path=f"{name}.log")
    config.metadata.name = name
    return config
