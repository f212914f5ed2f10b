"""Tests that an error is a single line: for an ordinary user, without a server, with another
program on the socket, with a wrong configuration, with closed streams."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cri.client_verbs import local_command_line
from tests.cri.server_harness import REPOSITORY, Server
from tests.support import session
from tests.support.processes import wait_until

NOBODY = 65534
# Each command runs in a fork of one interpreter, because importing takes most of the time. All
# modules are imported before setuid: the repository may be readable for root only.
RUNNER = """
import importlib, json, os, pkgutil, sys
import cri_server, grpc._channel, grpc._compression, pyrunc
for package in (cri_server, pyrunc):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from cri_server.cli import main
user, commands = json.loads(sys.argv[1])
os.environ.pop("XDG_RUNTIME_DIR", None)
os.chdir("/")
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
answers = []
for words in commands:
    ours, its = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(its, 1), os.dup2(its, 2), os.close(ours), os.close(its)
        sys.argv = words
        sys.exit(main.main() if words[0] == "pyrunc-cri" else pyrunc.cli.main.main())
    os.close(its)
    with open(ours) as file:
        output = file.read()
    answers.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output))
print(json.dumps(answers))
"""
POD = "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c, image: i}]}}"
COMMANDS: list[list[str]] = [
    ["ps"],
    ["ps", "-a", "-q"],
    ["pods"],
    ["logs", "-f", "x"],
    ["exec", "x", "true"],
    ["stop", "x"],
    ["rm", "x"],
    ["rm", "--all"],
    ["image", "list"],
    ["image", "pull", "x"],
    ["image", "load", "/etc/passwd"],
    ["image", "remove", "x"],
]


Answer = tuple[int, str]


def answers(*commands: list[str], user: int = 0) -> list[Answer]:
    """Run the commands as `user`; return exit code and output (stdout and stderr together) of
    each."""
    request = json.dumps([user, commands])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, request], cwd=REPOSITORY, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    return [(code, output) for code, output in json.loads(done.stdout)]


def client(*commands: list[str], user: int = 0) -> list[Answer]:
    return answers(*(["pyrunc-cri", *arguments] for arguments in commands), user=user)


def refused(answer: Answer, message: str, expected_code: int = 1) -> None:
    """Check the exit code, and that the output is one line that begins with the program's name."""
    code, output = answer
    assert code == expected_code and output.count("\n") == 1 and message in output, answer
    assert output.startswith("pyrunc-cri: "), answer


@contextlib.contextmanager
def listening(
    path: Path, answer: Callable[[socket.socket], object] = lambda connection: None
) -> Iterator[None]:
    """Listen on a socket and call `answer` for each connection; connections stay open until the
    end."""
    connections: list[socket.socket] = []

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                answer(connection)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def test_an_ordinary_user_gets_an_error_about_the_socket(server: Server) -> None:
    address = f"unix://{server.socket}"
    server.folder.chmod(0o755)
    manifest = server.folder / "pod.yaml"
    manifest.write_text(POD)
    commands = [*COMMANDS, ["run", str(manifest)], ["run", "--rm", str(manifest)]]
    for answer in client(*(["--address", address, *words] for words in commands), user=NOBODY):
        refused(answer, f"no access to {address}: permission denied")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a new folder that every user can reach."""
    # Only root can reach pytest's temporary folders.
    with tempfile.TemporaryDirectory(prefix=session.name("open")) as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_an_ordinary_user_cannot_run_a_server_or_read_roots_files(open_folder: Path) -> None:
    public, private = open_folder / "public", open_folder / "private"
    for path, mode in ((public, 0o644), (private, 0o600)):
        path.write_text(POD)
        path.chmod(mode)
    commands = (
        ["serve"],
        ["demo", str(public)],
        ["run", str(private)],
        ["image", "load", str(private)],
    )
    serve, demo, run, load, config = client(
        *commands, ["serve", "--config", str(private)], user=NOBODY
    )
    refused(serve, f"the server needs root, but this is user {NOBODY}")
    refused(demo, f"the server needs root, but this is user {NOBODY}")
    refused(run, f"{private}: cannot be read: permission denied")
    refused(load, f"'{private}': permission denied")
    refused(config, f"{private}: cannot be read: permission denied")


def test_the_runtime_prints_a_single_line_for_an_ordinary_user() -> None:
    command_lines = (
        "list",
        "state x",
        "kill x",
        "delete x",
        "ps x",
        "start x",
        "pause x",
        "resume x",
        "events x",
        "spec",
        "run -b / x",
        "create -b / x",
        "update --memory 1 x",
        "--root /root/x list",
        "exec x true",
    )
    commands = [["pyrunc", *arguments.split()] for arguments in command_lines]
    for arguments, (code, output) in zip(
        command_lines, answers(*commands, user=NOBODY), strict=True
    ):
        assert code == (255 if arguments.startswith("exec") else 1), (arguments, output)
        assert output.count("\n") == 1 and "level=error" in output, (arguments, output)
        assert "internal error" not in output, (arguments, output)


def test_missing_sockets_and_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "stale"))
    reasons = {
        f"unix://{tmp_path}/none": "no such file (start one: pyrunc-cri serve)",
        f"unix://{tmp_path}/file": "it is not a socket",
        f"unix://{tmp_path}": "it is not a socket",
        f"unix://{tmp_path}/file/x": "Not a directory",
        f"unix://{tmp_path}/stale": (
            "connection refused, the socket is of a server that has ended (start one: pyrunc-cri"
            " serve)"
        ),
    }
    for address, answer in zip(
        reasons, client(*(["--address", a, "ps"] for a in reasons)), strict=True
    ):
        refused(answer, f"no server at {address}: {reasons[address]}")
    wrong = ("nonsense", "http://x", "unix://relative", "unix:///" + "x" * 107)
    for address, answer in zip(
        wrong, client(*(["--address", a, "ps"] for a in wrong)), strict=True
    ):
        refused(answer, f"address {address!r}: expected unix:///PATH", 2)
    missing = str(tmp_path / "missing")
    run, load, serve = client(
        ["run", missing], ["image", "load", missing], ["serve", "--config", missing]
    )
    refused(run, f"{missing}: cannot be read: no such file or directory")
    refused(load, f"{missing!r}: no such file or directory")
    refused(serve, f"{missing}: no such file")


def test_the_error_reports_a_socket_of_another_program(tmp_path: Path) -> None:
    others: dict[str, Callable[[socket.socket], object]] = {
        "silent": lambda connection: None,
        "short": lambda connection: connection.close(),
        "http": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in others.items():
            stack.enter_context(listening(tmp_path / name, answer))
        results = client(*(["--address", f"unix://{tmp_path}/{name}", "ps"] for name in others))
    for name, result in zip(others, results, strict=True):
        refused(
            result, f"the process that listens at unix://{tmp_path}/{name} is not a CRI server: "
        )


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    commands = []
    for flag in ("--listen", "--root", "--state"):
        places = {
            "--listen": f"unix://{tmp_path}/sock",
            "--root": f"{tmp_path}/root",
            "--state": f"{tmp_path}/state",
        }
        places[flag] = ("unix://" if flag == "--listen" else "") + f"{tmp_path}/file"
        commands.append(["serve", *(word for pair in places.items() for word in pair)])
    for code, output in client(*commands):
        last = output.splitlines()[-1]
        assert code == 1 and last.startswith("pyrunc-cri: ") and f"{tmp_path}/file" in last, output
        assert "Traceback" not in output
    assert (tmp_path / "file").read_text() == "precious"


def test_the_error_names_a_wrong_configuration(tmp_path: Path) -> None:
    wrong = {
        "x = [": "not TOML",
        "[server]\nlisten = 5": "server.listen: expected",
        "\0": "not TOML",
    }
    paths = [tmp_path / f"{number}.toml" for number in range(len(wrong))]
    for path, text in zip(paths, wrong, strict=True):
        path.write_text(text)
    results = client(*(["serve", "--config", str(path)] for path in [*paths, tmp_path]))
    for path, answer, message in zip(paths, results, wrong.values(), strict=False):
        refused(answer, f"{path}:")
        refused(answer, message)
    refused(results[-1], f"{tmp_path}: cannot be read: is a directory")


def test_a_taken_streaming_port_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "config.toml").write_text(f"[streaming]\nport = {port}\n")
        arguments = ("--config", f"{tmp_path}/config.toml", "--listen", f"unix://{tmp_path}/sock")
        ((code, output),) = client(
            ["serve", *arguments, "--root", f"{tmp_path}/root", "--state", f"{tmp_path}/state"]
        )
    last = output.splitlines()[-1]
    assert code == 1 and last.startswith(
        f"pyrunc-cri: streaming.host 127.0.0.1, streaming.port {port}: "
    ), output
    assert "Traceback" not in output


def test_closed_standard_streams_are_tolerated(server: Server) -> None:
    container = server.launch(server.run_pod())
    command = local_command_line(server)
    for arguments in (["ps"], ["logs", container], ["exec", "nobody", "true"]):
        done = subprocess.run(
            ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command, *arguments],
            cwd=REPOSITORY,
            timeout=60,
        )
        assert done.returncode == (1 if "nobody" in arguments else 0), arguments


def test_an_interrupt_of_the_demo_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cri_server.cli.main", "demo", "pod.yaml"],
        cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"server up")
    assert wait_until(lambda: list(tmp_path.glob("*/pods/*/pod")), 30), "the pod's folder"
    # Ctrl-C reaches all processes of the terminal's foreground group.
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGINT, b"")
    assert not list(tmp_path.iterdir())
