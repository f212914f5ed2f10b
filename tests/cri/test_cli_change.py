"""Tests verbs that change containers or connect to them: stop, kill, rm, restart, update, cp,
attach, port-forward; and their confirmation prompts."""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import subprocess
import sys
import tarfile
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.cli.containers.stop import signal_number
from cri_server.cli.streams import session
from pyrunc.errors import Error
from tests.cri.client_verbs import call, cli, command_line, ended, ok, on_terminal, started
from tests.cri.server_harness import REPOSITORY, Server
from tests.support.processes import wait_until

KUBELET = {"io.kubernetes.pod.uid": "some-uid"}
PATIENT = "trap 'echo got it; exit 5' TERM; echo up; while :; do sleep 0.05; done"


def pod(server: Server, name: str, *command: str, **labels: str) -> str:
    """Run a pod with a container `c`; return its id."""
    sandbox = server.run_pod(server.pod_config(name, labels=labels))
    server.launch(sandbox, server.container_config(command or ("sleep", "3600")))
    return sandbox


def rm(server: Server, *arguments: str) -> tuple[str, ...]:
    return ("rm", "--folder", str(server.folder / "pods"), *arguments)


def names(server: Server) -> set[str]:
    return {p.metadata.name for p in server.pods()}


def test_running_containers_are_removed_only_after_a_question(server: Server) -> None:
    pod(server, "web")
    error = "remove web: c is running: needs confirmation, but stdin is not a terminal; use --force"
    assert call(server, *rm(server, "web")).error == error
    assert call(server, "rmp", "web").error == error
    assert "c is running" in call(server, *rm(server, "c")).error
    ok(server, "stop", "-t", "0", "c")
    ok(server, *rm(server, "web/c"))
    assert names(server) == {"web"} and not server.containers()
    ok(server, *rm(server, "web"))
    assert not server.pods()


def test_all_asks_and_skips_pods_of_kubelet(server: Server) -> None:
    pod(server, "one")
    pod(server, "two", app="x")
    kubelets = pod(server, "node", **KUBELET)
    assert "stop all 2" in call(server, "stop", "--all").error
    assert len([p for p in server.pods() if p.state == api.SANDBOX_READY]) == 3
    result = ok(server, "stop", "--all", "--force", "-t", "0")
    assert "1 pods of kubelet are skipped" in result.err
    assert [p.id for p in server.pods() if p.state == api.SANDBOX_READY] == [kubelets]
    ok(server, *rm(server, "--label", "app=x", "-f"))
    assert names(server) == {"one", "node"}
    ok(server, *rm(server, "-a", "-f"))
    assert names(server) == {"node"}
    ok(server, *rm(server, "-a", "-f", "--kubelet"))
    assert not server.pods()


@pytest.mark.parametrize("verb", [["stop"], ["stopp"], ["kill"], ["restart"], ["rm"], ["rmp"]])
def test_pods_of_kubelet_are_changed_only_on_request(server: Server, verb: list[str]) -> None:
    pod(server, "node", **KUBELET)
    error = call(server, *verb, "node").error
    assert error.startswith("node belongs to kubelet, which makes it again; use --force to ")
    assert [c.state for c in server.containers()] == [api.CONTAINER_RUNNING]
    if verb == ["restart"]:
        ok(server, "restart", "-f", "-t", "0", "node")
        assert [c.state for c in server.containers()] == [api.CONTAINER_EXITED], (
            "kubelet, not restart, starts it again"
        )


def test_a_confirmation_is_requested_on_a_terminal(server: Server) -> None:
    pod(server, "web")
    for typed, left in (("n\n", {"web"}), ("y\n", set())):
        done = on_terminal(server, "rm", "-a", stdin=typed)
        assert "remove default/web" in done.stdout and "[y/N]" in done.stdout
        assert names(server) == left


def test_an_error_does_not_stop_the_others(server: Server) -> None:
    pod(server, "web")
    result = call(server, "stop", "-t", "0", "nobody", "web")
    assert (result.code, result.out, result.err) == (
        1,
        "web\n",
        "pyrunc-cri: no such pod or container: 'nobody'\n",
    )
    assert call(server, "stop").code == 2 and call(server, "stop", "-a", "web").code == 2
    assert call(server, "stopp", "main").error == "no such pod: 'main'"


def test_a_name_takes_precedence_over_a_prefix_of_an_id(server: Server) -> None:
    """If a word is the name of a container and a prefix of its pod's id, `stop` stops the
    container."""
    sandbox = server.run_pod(server.pod_config("web"))
    config = server.container_config()
    config.metadata.name = sandbox[:4]
    server.launch(sandbox, config)
    ok(server, "stop", "-t", "0", sandbox[:4])
    assert [p.state for p in server.pods()] == [api.SANDBOX_READY]
    assert [c.state for c in server.containers()] == [api.CONTAINER_EXITED]
    ok(server, "stop", sandbox[:5])
    assert [p.state for p in server.pods()] == [api.SANDBOX_NOTREADY]


def test_kill_sends_the_signal(server: Server) -> None:
    sandbox = pod(server, "web", "sh", "-c", PATIENT)
    (container,) = server.containers(pod_sandbox_id=sandbox)
    server.wait_logged(container.id, "up")
    ok(server, "kill", "-s", "TERM", "c")
    assert server.wait_exit(container.id).exit_code == 5
    assert call(server, "kill", "c").error == "c is not running"
    pod(server, "two")
    ok(server, "kill", "two")
    (other,) = (c for c in server.containers() if c.pod_sandbox_id != sandbox)
    assert server.wait_exit(other.id).exit_code == 128 + signal.SIGKILL
    assert call(server, "kill", "-s", "NO", "c").error == "--signal NO: no such signal"


def test_signals_are_accepted_by_name_and_number() -> None:
    assert [signal_number(text) for text in ("TERM", "SIGTERM", "sigterm", "15", "RTMIN+1")] == [
        *[signal.SIGTERM] * 4,
        signal.SIGRTMIN + 1,
    ]
    for text in ("0", "99999x", "", "FOO", "RTMIN+x"):
        with pytest.raises(Error, match="no such signal"):
            signal_number(text)


def test_restart_makes_another_attempt_and_keeps_the_previous_attempt(server: Server) -> None:
    sandbox = server.run_pod(server.pod_config("web"))
    config = server.container_config(
        ["sh", "-c", "echo $COLOUR; exec sleep 3600"],
        envs=[api.KeyValue(key="COLOUR", value=b"blue")],
    )
    first = server.launch(sandbox, config)
    server.wait_logged(first, "blue")
    for attempt in (1, 2):
        ok(server, "restart", "-t", "0", "c")
        containers = {c.metadata.attempt: c for c in server.containers()}
        assert sorted(containers) == [attempt - 1, attempt], "the last two attempts exist"
        assert containers[attempt].state == api.CONTAINER_RUNNING
        server.wait_logged(containers[attempt].id, "blue")
    assert ok(server, "logs", "c").lines == ["blue"] == ok(server, "logs", "-p", "c").lines
    ok(server, "restart", "-t", "0", "web")
    assert max(c.metadata.attempt for c in server.containers()) == 3


def test_update_changes_the_limits_of_a_container(server: Server) -> None:
    pod(server, "web")
    ok(server, "update", "--memory", "64m", "--cpus", "0.5", "c")
    resources = ok(server, "inspect", "c").json["status"]["resources"]["linux"]
    assert (resources["memoryLimitInBytes"], resources["cpuQuota"]) == (str(64 << 20), "50000")
    assert call(server, "update", "c").code == 2
    assert (
        call(server, "update", "-m", "much", "c").error
        == "--memory much: expected bytes such as 64Mi"
    )


# -- cp


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a folder with a file, a subfolder with a program, and a link to a file outside."""
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("content")
    (folder / "sub" / "program").write_text("#!/bin/sh\necho ran\n")
    (folder / "sub" / "program").chmod(0o4755)
    (folder / "link").symlink_to("/etc/hostname")
    os.chown(folder / "file", 33, 33)
    return folder


@pytest.fixture
def container(server: Server) -> Iterator[str]:
    pod(server, "web")
    yield server.containers()[0].id


def test_cp_copies_into_a_container_and_out(
    server: Server, container: str, tree: Path, tmp_path: Path
) -> None:
    ok(server, "cp", str(tree), "c:/copied")
    assert server.output(container, "/copied/sub/program") == "ran\n"
    assert (
        server.output(container, "stat", "-c", "%u %a", "/copied/file", "/copied/sub/program")
        == "0 644\n0 755\n"
    )
    assert server.output(container, "readlink", "/copied/link") == "/etc/hostname\n"
    ok(server, "cp", "-a", str(tree), "c:/copied")  # the folder exists now, so cp copies into it
    assert (
        server.output(
            container, "stat", "-c", "%u %a", "/copied/tree/file", "/copied/tree/sub/program"
        )
        == "33 644\n0 4755\n"
    )
    ok(server, "cp", "web/c:/copied/.", str(tmp_path / "back"))
    assert (tmp_path / "back" / "file").read_text() == "content"
    ok(server, "cp", "c:/copied/file", str(tmp_path / "back"))
    ok(server, "cp", "c:/copied/file", str(tmp_path / "renamed"))
    assert (tmp_path / "renamed").read_text() == "content"
    assert not list(tmp_path.rglob("*.part"))


def test_cp_overwrites_a_mounted_file(server: Server, container: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("1.2.3.4 there\n")
    # /etc/hosts is a mount point, which cp cannot replace by rename(2).
    ok(server, "cp", str(tmp_path / "hosts"), "c:/etc/hosts")
    assert server.output(container, "cat", "/etc/hosts") == "1.2.3.4 there\n"


def test_cp_follows_no_link_out_of_the_container(
    server: Server, container: str, tmp_path: Path
) -> None:
    """Links on the way to source or destination are resolved inside the container."""
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("of the host")
    target.mkdir()
    server.output(
        container,
        "sh",
        "-c",
        f"mkdir -p /d{tmp_path}; ln -s {secret} /d/leak; ln -s {target} /d/out; ln -s / /d/up",
    )
    error = call(server, "cp", "-L", "c:/d/leak", str(tmp_path / "got")).error
    assert "No such file" in error or "ENOENT" in error or "not exist" in error, error
    ok(server, "cp", "c:/d/leak", str(tmp_path / "got"))
    assert (tmp_path / "got").is_symlink(), "cp copies the link itself"
    assert call(server, "cp", str(secret), "c:/d/out/x").error
    ok(server, "cp", str(secret), "c:/d/up/../../../x")
    assert server.output(container, "cat", "/x") == "of the host" and not list(target.iterdir())


def test_cp_reads_and_writes_archives(server: Server, container: str, tree: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(tree, "t")
    server.output(container, "mkdir", "/in")
    done = cli(server, "cp", "-", "c:/in", stdin=content.getvalue())
    assert server.output(container, "cat", "/in/t/file") == "content" and done.stdout == b""
    out = cli(server, "cp", "c:/in/t", "-").stdout
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert {"t", "t/file", "t/sub/program", "t/link"} <= set(archive.getnames())
    bad = io.BytesIO()
    with tarfile.open(fileobj=bad, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../x"))
    assert (
        b"leads out of the destination"
        in cli(server, "cp", "-", "c:/in", stdin=bad.getvalue(), code=1).stderr
    )
    assert (
        b"stdin is not a tar archive"
        in cli(server, "cp", "-", "c:/in", stdin=b"x" * 1000, code=1).stderr
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["/a", "/b"], "exactly one of SOURCE and DESTINATION must be CONTAINER:PATH"),
        (["c:/a", "c:/b"], "exactly one of SOURCE and DESTINATION must be CONTAINER:PATH"),
        (["c:/nothing", "/tmp/x"], "/nothing"),
        (["nobody:/x", "/tmp/x"], "no such container: 'nobody'"),
        (["/etc/hostname", "c:/new/"], "is not a folder"),
        (["/etc/hostname", "c:/no/such/folder"], "/no/such"),
        (["/etc", "c:/etc/hosts"], "'hosts' exists and is not a folder"),
    ],
)
def test_cp_errors_name_the_path(
    server: Server, container: str, words: list[str], problem: str
) -> None:
    assert problem in call(server, "cp", *words).error


def test_cp_needs_a_running_container(server: Server, container: str) -> None:
    server.stop_container(container)
    assert "container c is not running" in call(server, "cp", "c:/etc/hosts", "/tmp/x").error


# -- streams


def test_attach_shows_output_and_returns_the_code(server: Server) -> None:
    sandbox = server.run_pod(server.pod_config("web"))
    config = server.container_config(
        ["sh", "-c", "read line; echo got $line; echo err >&2; exit 6"], stdin=True, stdin_once=True
    )
    server.launch(sandbox, config)
    done = cli(server, "attach", "-i", "c", stdin=b"word\n", code=6)
    assert (done.stdout, done.stderr) == (b"got word\n", b"err\n")


def test_detach_keys_end_the_session_and_are_not_sent() -> None:
    class Socket:
        sent = b""

    for text, keys, passed, detached in (
        (b"abc", "ctrl-p,ctrl-q", b"abc", False),
        (b"a\x10b", "ctrl-p,ctrl-q", b"a\x10b", False),
        (b"a\x10\x11b", "ctrl-p,ctrl-q", b"a", True),
        (b"\x10\x10\x11", "ctrl-p,ctrl-q", b"\x10", True),
        (b"xq", "q", b"x", True),
        (b"\x10\x11", "", b"\x10\x11", False),
    ):
        feeder = session.Feeder(Socket(), session.parse_keys(keys))
        parts = [
            feeder._without_keys(bytes([byte])) for byte in text[: len(text)] if not feeder.detached
        ]
        assert (b"".join(parts), feeder.detached) == (passed, detached), (text, keys)
    with pytest.raises(Error, match="'ctrl-' is neither"):
        session.parse_keys("ctrl-")


def test_detaching_leaves_the_container_running(server: Server) -> None:
    sandbox = server.run_pod(server.pod_config("web"))
    server.launch(sandbox, server.container_config(["cat"], stdin=True, tty=True))
    master, slave = os.openpty()
    try:
        command = command_line(server, "attach", "-i", "c")
        with subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=REPOSITORY
        ) as process:
            timer = threading.Timer(60, process.kill)
            timer.start()
            raw = wait_until(lambda: not termios.tcgetattr(slave)[3] & termios.ECHO, 30)
            # input before the terminal becomes raw is dropped
            os.write(master, b"hello\r")
            output = b""
            while (
                raw and b"hello\r\nhello" not in output and select.select([master], [], [], 30)[0]
            ):
                output += os.read(master, 1000)
            os.write(master, b"\x10\x11")
            assert (process.wait(), b"hello\r\nhello" in output) == (0, True)
            timer.cancel()
    finally:
        os.close(master)
        os.close(slave)
    assert [c.state for c in server.containers()] == [api.CONTAINER_RUNNING]


def test_port_forward_reaches_a_port_of_the_pod(server: Server) -> None:
    answer = "while :; do printf 'HTTP/1.0 200 OK\\r\\n\\r\\nhello' | nc -l -p 8080; done"
    pod(server, "web", "sh", "-c", answer)
    with started(server, "port-forward", "web", ":8080") as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode().split()
        assert line[:2] == ["Forwarding", "from"] and line[3:] == ["->", "8080"]
        fetch = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {line[2].split(':')[1]}));"
            " s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); print(s.makefile().read())"
        )

        def answers() -> bool:
            done = subprocess.run(
                ["nsenter", f"--net=/proc/{server.pid}/ns/net", "--", sys.executable, "-c", fetch],
                capture_output=True,
                timeout=30,
            )
            return b"hello" in done.stdout

        assert wait_until(answers, 30)
        process.send_signal(signal.SIGINT)
        assert ended(process)[1] == 128 + signal.SIGINT


def test_port_forward_reports_errors(server: Server) -> None:
    pod(server, "web")
    assert call(server, "port-forward", "web", "X").error == "'X' is not [LOCAL:]PORT"
    assert call(server, "port-forward", "web", "0").error == "'0' is not [LOCAL:]PORT"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            f"cannot listen on 127.0.0.1:{port}"
            in call(server, "port-forward", "web", f"{port}:80").error
        )
    server.stop_pod(server.pods()[0].id)
    assert "is not ready" in call(server, "port-forward", "web", ":80").error
