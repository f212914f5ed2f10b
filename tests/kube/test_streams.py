"""Tests kubectl on a running pod: logs, exec, attach, cp, port-forward, debug."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import ssl
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.kube.pods import SERVING, Kube, pod, shell
from tests.support import toolchain

OWN_MINOR = int(toolchain.KUBERNETES.split(".")[1])


def test_logs_follow_and_show_all_lines(kube: Kube) -> None:
    kube.run(
        pod(
            "p",
            shell("i=0; while true; do echo line $i; echo err $i >&2; i=$((i+1)); sleep 0.2; done"),
        )
    )
    follow = kube.popen("logs", "-f", "p", stdout=subprocess.PIPE)
    assert follow.stdout
    seen = [follow.stdout.readline().decode().strip() for _ in range(20)]
    follow.terminate()
    follow.wait()
    follow.stdout.close()
    assert [line for line in seen if line.startswith("line")] == [
        f"line {i}" for i in range(sum(s.startswith("line") for s in seen))
    ]
    assert "err 0" in seen
    assert kube.logs("p", "--tail=1").startswith(("line", "err"))
    assert kube.logs("p", "--timestamps", "--tail=1")[:2] == "20"


def test_a_long_line_comes_back_whole(kube: Kube) -> None:
    kube.finished(
        pod(
            "p",
            shell("head -c 100000 /dev/zero | tr '\\0' x; echo; printf unterminated"),
            restartPolicy="Never",
        )
    )
    assert kube.logs("p") == "x" * 100000 + "\nunterminated"


def test_exec_passes_exit_codes_and_stdin(kube: Kube) -> None:
    kube.run(pod("p"))
    assert kube.exec("p", "sh", "-c", "exit 42", check=False).returncode == 42
    assert kube.exec("p", "sh", "-c", "kill -9 $$", check=False).returncode == 137
    assert (
        kube("exec", "-i", "p", "--", "md5sum", input="hello\n").stdout
        == "b1946ac92492d2347c6235b4d2611184  -\n"
    )
    done = kube.exec("p", "sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    missing = kube.exec("p", "no-such-program", check=False)
    assert missing.returncode != 0
    assert "no-such-program" in missing.stderr


def test_exec_moves_much_data_both_ways(kube: Kube) -> None:
    kube.run(pod("p"))
    size = 20_000_000
    back = subprocess.run(
        kube.command("exec", "-i", "p", "--", "cat"),
        input=bytes(size),
        capture_output=True,
        check=True,
    )
    assert len(back.stdout) == size
    assert back.stdout.count(0) == size


def test_exec_can_have_a_terminal_and_resize_it(kube: Kube) -> None:
    kube.run(pod("p"))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 33, 101, 0, 0))
    child = kube.popen(
        "exec",
        "-it",
        "p",
        "--",
        "sh",
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        os.write(master, b"tty; stty size\n")
        assert "/dev/pts/0" in (text := _read_until(master, "33 101"))
        assert "33 101" in text
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 44, 88, 0, 0))
        os.kill(child.pid, signal.SIGWINCH)
        os.write(
            master, b'until [ "$(stty size)" = "44 $((80+8))" ]; do sleep 0.1; done; stty size\n'
        )
        _read_until(master, "44 88")
        os.write(master, b"exit 7\n")
        assert child.wait(timeout=60) == 7
    finally:
        child.kill()
        child.wait()
        os.close(master)


# Kubernetes' conformance suite and dashboards send an Origin that differs from the name by which
# kubelet calls the server.
@pytest.mark.parametrize("origin", ["http://localhost/", "https://dashboard.example"])
def test_exec_by_websocket_accepts_another_origin(kube: Kube, origin: str) -> None:
    kube.run(pod("p"))
    command = [("command", word) for word in ("sh", "-c", "echo through; exit 3")]
    messages = []
    query = [("stdout", "1"), ("stderr", "1"), *command]
    with _websocket(kube, "p/exec", query, origin) as client, pytest.raises(ConnectionClosed):
        while True:
            messages.append(client.recv(timeout=60))
    assert b"".join(bytes(m)[1:] for m in messages if bytes(m)[:1] == b"\x01") == b"through\n"
    (status,) = (
        json.loads(bytes(m)[1:]) for m in messages if bytes(m)[:1] == b"\x03" and len(m) > 1
    )
    assert status["details"]["causes"][0]["message"] == "3"


def _websocket(
    kube: Kube, path: str, query: list[tuple[str, str]], origin: Any
) -> ClientConnection:
    """Return a WebSocket to the API server, with the client certificate of kubectl's
    configuration."""
    config = json.loads(kube.cluster.kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    context = ssl.create_default_context(cafile=cluster["certificate-authority"])
    context.load_cert_chain(user["client-certificate"], user["client-key"])
    return connect(
        f"wss://{urlsplit(cluster['server']).netloc}/api/v1/namespaces/{kube.namespace}"
        f"/pods/{path}?{urlencode(query)}",
        ssl=context,
        origin=origin,
        subprotocols=[Subprotocol("v4.channel.k8s.io")],
        proxy=None,
        compression=None,
    )


def test_attach_reads_and_writes_the_main_process(kube: Kube) -> None:
    kube.run(pod("p", shell("while read line; do echo got $line; done", stdin=True)))
    child = kube.popen(
        "attach",
        "-i",
        "p",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin
    assert child.stdout
    time.sleep(1)
    child.stdin.write(b"one\ntwo\n")
    child.stdin.flush()
    assert [child.stdout.readline(), child.stdout.readline()] == [b"got one\n", b"got two\n"]
    child.terminate()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert kube.get("p")["status"]["phase"] == "Running"
    assert "got two" in kube.logs("p")


def test_run_with_stdin_ends_when_stdin_does(kube: Kube) -> None:
    done = kube(
        "run",
        "once",
        "--image=busybox",
        "--rm",
        "-i",
        "--restart=Never",
        "--quiet",
        "--",
        "cat",
        input="through\n",
    )
    assert "through" in done.stdout


def test_kubectl_cp_copies_there_and_back(kube: Kube, tmp_path: Path) -> None:
    kube.run(pod("p"))
    (tmp_path / "a").write_bytes(os.urandom(3_000_000))
    kube("cp", str(tmp_path / "a"), "p:/tmp/a")
    kube("cp", "p:/tmp/a", str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@contextlib.contextmanager
def port_forward(kube: Kube, kubectl: Path, target: str) -> Iterator[int]:
    """Provide the local port of a running `kubectl port-forward` to port 80 of `target`."""
    arguments = ["port-forward", "--address=127.0.0.1", target, ":80"]
    with subprocess.Popen(
        kube.command(*arguments, kubectl=kubectl), stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        try:
            yield int(child.stdout.readline().split(b":")[1].split()[0])
        finally:
            child.terminate()


def request_page(port: int) -> tuple[socket.socket, bytes]:
    """Request nginx's page; return (connection, page). nginx closes the connection."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    answer = b""
    while not answer.endswith(b"</h1>\n"):
        piece = client.recv(65536)
        assert piece, answer
        answer += piece
    return client, answer


@pytest.mark.parametrize(
    "minor",
    [
        pytest.param(
            minor, marks=[] if minor == OWN_MINOR else [pytest.mark.slow, pytest.mark.timeout(900)]
        )
        for minor in toolchain.KUBECTL_RELEASES
    ],
)
def test_port_forward_ends_connections_that_the_pod_has_closed(kube: Kube, minor: int) -> None:
    kubectl = kube.cluster.bin / "kubectl" if minor == OWN_MINOR else toolchain.kubectl(minor)
    kube.run(pod("nginx", SERVING))
    with port_forward(kube, kubectl, "pod/nginx") as port, contextlib.ExitStack() as stack:
        clients = []
        for _ in range(301):  # more than the session's limit of open connections
            client, answer = request_page(port)
            clients.append(stack.enter_context(client))
            assert b"Welcome to nginx" in answer
        # kubectl up to 1.31 closes a local connection when the server has ended the error stream,
        # and not before.
        assert [client.recv(1) for client in clients] == [b""] * len(clients)


def test_debug_shares_the_target_pid_namespace(kube: Kube) -> None:
    kube.run(pod("p", {"command": ["sleep", "4242"]}))
    kube(
        "debug",
        "p",
        "--image=busybox",
        "--target=c",
        "--container=dbg",
        "--image-pull-policy=IfNotPresent",
        "--",
        "sleep",
        "600",
    )

    def running() -> bool:
        statuses = kube.get("p")["status"].get("ephemeralContainerStatuses", [])
        return any("running" in s["state"] for s in statuses)

    kube.until(running, "the ephemeral container")
    assert kube.sh("p", "tr '\\0' ' ' </proc/1/cmdline", container="dbg").strip() == "sleep 4242"


def _read_until(descriptor: int, expected: str, timeout_s: float = 60) -> str:
    deadline, text = time.monotonic() + timeout_s, ""
    os.set_blocking(descriptor, False)
    while expected not in text:
        assert time.monotonic() < deadline, f"{expected!r} did not come: {text!r}"
        try:
            text += os.read(descriptor, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.05)
    return text
