"""Tests a service manager that waits for its container: READY comes from inside, MAINPID and a
barrier from the runtime."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import Runtime

# busybox has no sd_notify, and its nc no unix sockets: a program of ours sends the message.
SENDER = """
#include <string.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
int main(int n, char **words) {
    struct sockaddr_un to = { AF_UNIX, "" };
    int s = socket(AF_UNIX, SOCK_DGRAM, 0);
    if (!getenv("NOTIFY_SOCKET")) return 3;
    strcpy(to.sun_path, getenv("NOTIFY_SOCKET"));
    for (int i = 1; i < n; i++) {
        sleep(1);
        if (sendto(s, words[i], strlen(words[i]), 0, (struct sockaddr *)&to, sizeof to) < 0)
            return perror("sendto"), 4;
    }
    puts("sent");
    fflush(stdout);
    return 0;
}
"""


class Manager:
    """The service manager's side: stores the messages, closes the barrier's descriptor."""

    def __init__(self, path: Path) -> None:
        self.path, self.received = path, []  # type: Path, list[str]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            for number in fds:
                os.close(number)
            if text == b"stop":
                return
            self.received.append(text.decode())

    def close(self) -> list[str]:
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"stop", str(self.path))
        self._thread.join()
        self._socket.close()
        return self.received


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "manager.sock")
    yield manager
    manager.close()


@pytest.fixture(scope="session")
def sender(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    import subprocess

    source = tmp_path_factory.mktemp("sender") / "sender.c"
    source.write_text(SENDER)
    subprocess.run(["cc", "-static", "-o", str(rootfs / "bin/say"), str(source)], check=True)
    return "/bin/say"


def test_start_waits_until_the_container_is_ready(
    runtime: Runtime, manager: Manager, sender: str
) -> None:
    box = runtime.box("sh", "-c", f"{sender} STATUS=x 'READY=1\nSTATUS=y' && sleep 1000")
    env = {"NOTIFY_SOCKET": str(manager.path)}
    box.create(env=env).ok()
    assert manager.received == []
    runtime("start", box.id, env=env).ok()
    messages = "\n".join(manager.close()).split()
    assert messages == ["READY=1", f"MAINPID={box.pid}", "BARRIER=1"]
    assert (
        box.exec("sh", "-c", "touch /run/notify/x 2>&1; mount | grep notify").out.count("ro,") == 1
    )
    assert "Read-only" in box.exec("touch", "/run/notify/x").err


def test_start_ends_with_a_container_that_is_never_ready(
    runtime: Runtime, manager: Manager, sender: str
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc waits as long as there is a zombie, and we reap it only later")
    box = runtime.box("sh", "-c", f"{sender} STATUS=x")
    env = {"NOTIFY_SOCKET": str(manager.path)}
    box.create(env=env).ok()
    runtime("start", box.id, env=env).ok()
    assert manager.close() == []


def test_a_detached_run_waits_until_the_container_is_ready(
    runtime: Runtime, manager: Manager, sender: str
) -> None:
    box = runtime.box("sh", "-c", f"{sender} READY=1 && sleep 1000")
    env = {"NOTIFY_SOCKET": str(manager.path)}
    runtime("run", "--detach", "--bundle", str(box.folder), box.id, env=env).ok()
    assert "".join(manager.close()).split() == ["READY=1", f"MAINPID={box.pid}", "BARRIER=1"]


def test_an_attached_run_is_the_main_process_itself(
    runtime: Runtime, manager: Manager, sender: str
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc copies no output before the container is ready")
    box = runtime.box("sh", "-c", f"{sender} READY=1; sleep 3")
    result = runtime(
        "run", "--bundle", str(box.folder), box.id, env={"NOTIFY_SOCKET": str(manager.path)}
    ).ok()
    assert result.out == "sent\n"
    ready, main, barrier = "".join(manager.close()).split()
    assert (ready, barrier) == ("READY=1", "BARRIER=1")
    assert main.startswith("MAINPID=")


def test_without_a_manager_the_container_has_no_socket(runtime: Runtime, sender: str) -> None:
    assert runtime.run("sh", "-c", f"{sender} READY=1; echo $?; ls /run").out.splitlines()[0] == "3"
