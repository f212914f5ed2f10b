"""Tests exec, attach and port forwarding with Go's client, the server, a shim, and a process in a
real container."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import RPC_TIMEOUT_S, Server
from tests.support.processes import wait_until

TRANSPORTS = {"spdy": [], "websocket": ["-websocket", "-protocol", "v5.channel.k8s.io"]}


@pytest.fixture
def node(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.remove_all()


class Client:
    """Starts Go's client in the server's network namespace."""

    def __init__(self, program: Path, server: Server) -> None:
        self._program, self._server = program, server

    def inside(self, *command: str | Path) -> list[str | Path]:
        return ["nsenter", f"--net=/proc/{self._server.pid}/ns/net", "--", *command]

    def exec(
        self,
        container: str,
        *command: str,
        stdin: bool = False,
        tty: bool = False,
        more: list[str] | None = None,
    ) -> subprocess.Popen[bytes]:
        request = api.ExecRequest(
            container_id=container, cmd=command, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = self._server.runtime.Exec(request, timeout=RPC_TIMEOUT_S).url
        return self._start(url, stdin, tty, more)

    def attach(
        self,
        container: str,
        *,
        stdin: bool = False,
        tty: bool = False,
        more: list[str] | None = None,
    ) -> subprocess.Popen[bytes]:
        request = api.AttachRequest(
            container_id=container, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = self._server.runtime.Attach(request, timeout=RPC_TIMEOUT_S).url
        return self._start(url, stdin, tty, more)

    def _start(
        self, url: str, stdin: bool, tty: bool, more: list[str] | None
    ) -> subprocess.Popen[bytes]:
        flags = [
            "-stdout",
            *(["-stdin"] if stdin else []),
            "-tty" if tty else "-stderr",
            *(more or []),
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.inside(self._program, "exec", "-url", url, *flags),
            stdin=pipe if stdin else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )

    @contextlib.contextmanager
    def forward(self, pod: str, *ports: int) -> Iterator[list[int]]:
        request = api.PortForwardRequest(pod_sandbox_id=pod, port=ports)
        url = self._server.runtime.PortForward(request, timeout=RPC_TIMEOUT_S).url
        arguments = ["forward", "-url", url, "-ports", ",".join(f":{port}" for port in ports)]
        process = subprocess.Popen(
            self.inside(self._program, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            yield [int(word) for word in process.stdout.readline().split()]
        finally:
            process.communicate(timeout=60)


@pytest.fixture
def client(goclient: Path, node: Server) -> Client:
    return Client(goclient, node)


@pytest.fixture
def container(node: Server) -> str:
    return node.launch(node.run_pod())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exec_runs_in_a_container(client: Client, container: str, transport: str) -> None:
    process = client.exec(
        container, "sh", "-c", "cat; echo oh >&2; exit 7", stdin=True, more=TRANSPORTS[transport]
    )
    assert process.communicate(b"input\n", timeout=60) == (b"input\n", b"oh\n")
    assert process.returncode == 7


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exec_can_have_a_terminal(client: Client, container: str, transport: str) -> None:
    more = [*TRANSPORTS[transport], "-sizes", "91x17"]
    script = (
        'tty; while [ "$(stty size)" != "17 91" ]; do sleep 0.05; done; read line; echo "got'
        ' $line"; exit 3'
    )
    process = client.exec(container, "sh", "-c", script, stdin=True, tty=True, more=more)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"/dev/pts/0\r\n"
    process.stdin.write(b"this\r")
    process.stdin.flush()
    assert process.stdout.read().endswith(b"got this\r\n")
    assert process.wait(60) == 3  # stdin is still open
    process.communicate()


def test_exec_of_a_missing_program_is_an_error(client: Client, container: str) -> None:
    process = client.exec(container, "/no/such/command")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"/no/such/command" in stderr


def test_a_container_returns_large_data_unchanged(client: Client, container: str) -> None:
    data = os.urandom(40 << 20)
    process = client.exec(container, "cat", stdin=True)
    assert process.communicate(data, timeout=60)[0] == data


def processes(node: Server, container: str) -> str:
    return node.output(container, "ps")


def test_an_exec_dies_with_its_client(client: Client, node: Server, container: str) -> None:
    process = client.exec(container, "sh", "-c", "sleep 4711 & echo ready; sleep 4712")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert "4711" in processes(node, container)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert wait_until(lambda: "471" not in processes(node, container), 60), processes(
        node, container
    )


def shell(node: Server, **changes: bool) -> str:
    return node.launch(node.run_pod(), node.container_config(["sh"], stdin=True, **changes))


@pytest.mark.requirement("9.8")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_end_of_stdin_reaches_the_container(
    client: Client, node: Server, transport: str
) -> None:
    container = shell(node, stdin_once=True)
    process = client.attach(container, stdin=True, more=TRANSPORTS[transport])
    # as critest does: write to a shell, end stdin, read the output to its end
    assert process.communicate(b"echo hello\n", timeout=60) == (b"hello\n", b"")
    assert process.returncode == 0
    assert node.wait_exit(container).exit_code == 0


@pytest.mark.requirement("9.8")
def test_a_client_can_leave_and_attach_again(client: Client, node: Server) -> None:
    container = shell(node)
    first = client.attach(container, stdin=True)
    assert first.stdin is not None and first.stdout is not None
    first.stdin.write(b"echo first\n")
    first.stdin.flush()
    assert first.stdout.readline() == b"first\n"
    first.kill()
    first.communicate()
    second = client.attach(container, stdin=True)
    assert second.communicate(b"echo second; exit 9\n", timeout=60)[0] == b"second\n"
    assert second.returncode == 9
    assert node.log_lines(container) == ["first", "second"]


def test_all_attached_clients_get_the_same_output(client: Client, node: Server) -> None:
    script = "until [ -e /all ]; do echo tick; sleep 0.1; done; read x; echo to $x"
    container = node.launch(node.run_pod(), node.container_config(["sh", "-c", script], stdin=True))
    watchers = [client.attach(container) for _ in range(5)]
    # A client that has got a tick is attached.
    for watcher in watchers:
        assert watcher.stdout is not None and watcher.stdout.readline() == b"tick\n"
    node.output(container, "touch", "/all")
    writer = client.attach(container, stdin=True)
    assert writer.communicate(b"all\n", timeout=60)[0].splitlines()[-1] == b"to all"
    for watcher in watchers:
        assert watcher.stdout is not None
        *ticks, last = watcher.stdout.read().splitlines()
        assert set(ticks) <= {b"tick"} and last == b"to all"
        watcher.communicate(timeout=60)


def test_a_client_can_attach_to_a_terminal(client: Client, node: Server) -> None:
    container = shell(node, tty=True)
    process = client.attach(container, stdin=True, tty=True, more=["-sizes", "91x17"])
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(
        b"while [ \"$(stty size)\" != '17 91' ]; do sleep 0.05; done; stty size; exit 5\r"
    )
    process.stdin.flush()
    assert b"17 91\r\n" in process.stdout.read()
    assert process.wait(60) == 5
    process.communicate()


@pytest.mark.requirement("9.12")
def test_port_forward_reaches_the_pod(client: Client, node: Server) -> None:
    pod = node.run_pod()
    node.launch(pod, node.container_config(["nc", "-ll", "-p", "8080", "-e", "cat"]))
    with client.forward(pod, 8080, 9) as (port, closed):
        for text in (b"one", b"two"):
            talk = subprocess.run(
                client.inside("busybox", "nc", "127.0.0.1", str(port)),
                input=text,
                capture_output=True,
                timeout=60,
            )
            assert talk.stdout == text
        refused = subprocess.run(
            client.inside("busybox", "nc", "127.0.0.1", str(closed)),
            input=b"",
            capture_output=True,
            timeout=60,
        )
        assert refused.stdout == b""


@pytest.mark.requirement("9.12")
def test_port_forward_reaches_a_pod_with_host_networking(client: Client, node: Server) -> None:
    pod = node.run_pod(host_network=True)
    node.launch(pod, node.container_config(["nc", "-ll", "-p", "12003", "-e", "cat"]))
    with client.forward(pod, 12003) as (port,):
        talk = subprocess.run(
            client.inside("busybox", "nc", "127.0.0.1", str(port)),
            input=b"here",
            capture_output=True,
            timeout=60,
        )
    assert talk.stdout == b"here"
