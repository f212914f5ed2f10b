"""Tests verbs and flags of crictl, nerdctl and podman: runp, create, wait, help, logs -c, inspect
-f, and exit codes for bad values."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.client_verbs import PROGRAM, call, ended, ok, started
from tests.cri.server_harness import IMAGE, Server
from tests.support.processes import wait_until


def write(folder: Path, name: str, document: object) -> str:
    path = folder / name
    path.write_text(json.dumps(document))
    return str(path)


def test_runp_and_create_read_cri_messages_from_files(server: Server, tmp_path: Path) -> None:
    """Keys have the form of CRI's interface file (`log_path`), as in crictl's examples, or of
    protobuf's JSON (`logPath`)."""
    pod = {
        "metadata": {"name": "p", "namespace": "d", "uid": "u"},
        "log_directory": str(tmp_path),
        "linux": {},
    }
    container = {
        "metadata": {"name": "c"},
        "image": {"image": IMAGE},
        "command": ["sh", "-c", "echo $GREETING; echo $TAG; exit 4"],
        "envs": [{"key": "GREETING", "value": "hello=é"}, {"key": "TAG", "value": "v123"}],
        "logPath": "c.log",
        "linux": {},
    }
    files = write(tmp_path, "c.json", container), write(tmp_path, "p.json", pod)
    sandbox = ok(server, "runp", files[1]).out.strip()
    created = ok(server, "create", sandbox, *files).out.strip()
    assert server.status(created).state == api.CONTAINER_CREATED
    ok(server, "start", created)
    assert ok(server, "wait", "p/c").out == "4\n"
    assert ok(server, "logs", "p", "-c", "c", "--tail", "all").out == "hello=é\nv123\n"
    assert ok(server, "inspect", "-f", "{{.status.exitCode}}", "p/c").out == "4\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"metadata": {"nome": "x"}}', 'no field named "nome"'),
        ("[]", "expected an object"),
        ("{", "neither JSON nor YAML"),
    ],
)
def test_an_error_in_a_message_names_the_file(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    result = call("unix:///nowhere.sock", "runp", str(path))
    assert result.code == 1 and result.error.startswith(f"{path}: ") and problem in result.error


@pytest.mark.parametrize(
    "words",
    [
        ["logs", "--tail", "x", "c"],
        ["logs", "--since", "yesterday", "c"],
        ["ps", "-o", "xml"],
        ["ps", "--state", "red"],
        ["ps", "--filter", "colour=red"],
        ["ps", "--label", "a b"],
        ["ps", "--name", "("],
        ["attach", "--detach-keys", "ctrl", "c"],
        ["kill", "-s", "FOO", "c"],
        ["update", "--memory", "many", "c"],
        ["port-forward", "p", "0"],
        ["port-forward", "p", "1:2:3"],
        ["images", "--filter", "x"],
        ["timeline", "--json", "--html", "-"],
        ["--address", "tcp://x", "ps"],
    ],
)
def test_a_bad_value_has_exit_code_2(words: list[str]) -> None:
    command = [*PROGRAM, "--address", "unix:///nowhere.sock", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr, done


def test_help_describes_a_verb() -> None:
    assert (
        ok("unix:///x.sock", "help", "image", "prune").out
        == ok("unix:///x.sock", "image", "prune", "--help").out
    )
    assert "Pods and containers:" in ok("unix:///x.sock", "help").out
    assert call("unix:///x.sock", "help", "nope").code == 2


def test_runtime_config_shows_the_cgroup_driver(server: Server) -> None:
    assert ok(server, "runtime-config").json["linux"]["cgroupDriver"] == "CGROUPFS"
    server.launch(server.run_pod())
    (pod,) = server.pods()
    assert [each["podSandboxId"] for each in ok(server, "metricsp").json["podMetrics"]] == [pod.id]
    assert ok(server, "metricdescs").json["descriptors"]
    assert ok(server, "stats", "--no-stream", "--seconds", "0").lines[1:]


def test_update_warns_about_missing_controllers(server: Server) -> None:
    server.launch(server.run_pod())
    # The server has `missing_controllers = "warn"`; its verbose status lists its controllers.
    config = ok(server, "info").json["config"]
    lines = ok(server, "update", "--cpus", "0.5", "--memory", "64Mi", "c").err.splitlines()
    fields = {line.split()[2] for line in lines}
    missing = {"cpu": {"cpu_period", "cpu_quota"}, "memory": {"memory_limit_in_bytes"}}
    expected = {
        f
        for name, group in missing.items()
        for f in group
        if name not in config["cgroupControllers"]
    }
    assert fields == expected


def test_ports_are_forwarded_by_name_and_on_both_loopbacks(server: Server) -> None:
    pod = server.run_pod(server.pod_config("web"))
    answer = "while :; do printf 'hello' | nc -l -p 8080; done"
    # kubelet writes this annotation.
    ports = json.dumps([{"name": "http", "containerPort": 8080, "protocol": "TCP"}])
    server.launch(
        pod,
        server.container_config(
            ["sh", "-c", answer], annotations={"io.kubernetes.container.ports": ports}
        ),
    )
    assert (
        call(server, "port-forward", "web", "nope").error
        == "the pod has no port named 'nope'; its named ports are: http"
    )
    with started(server, "port-forward", "web", ":http") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode().split() for _ in range(2)]
        addresses = [line[2].rpartition(":") for line in lines]
        assert [address[0] for address in addresses] == ["127.0.0.1", "[::1]"]
        assert addresses[0][2] == addresses[1][2] and {line[4] for line in lines} == {"8080"}
        fetch = (
            f"import socket; s = socket.create_connection(('::1', {addresses[1][2]}));"
            " print(s.makefile().read())"
        )

        def answers() -> bool:
            command = server.in_its_network(sys.executable, "-c", fetch)
            return b"hello" in subprocess.run(command, capture_output=True, timeout=30).stdout

        assert wait_until(answers, 30)
        process.send_signal(signal.SIGINT)
        assert ended(process)[1] == 128 + signal.SIGINT
