"""Tests filters whose calls a listener in user space answers: the recipient of the listener, and
the message."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.system.harness import Runtime


class Listener:
    """Receives a process's seccomp listener and closes it, after which waiting calls get ENOSYS."""

    def __init__(self, path: Path) -> None:
        self.path, self.states, self.kinds = path, [], []  # type: Path, list[dict[str, Any]], list[str]
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(4)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                text, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(16))
                if not text:
                    return
                for _, _, content in ancillary:
                    numbers = array.array("i", content[: len(content) // 4 * 4])
                    self.kinds += [os.readlink(f"/proc/self/fd/{number}") for number in numbers]
                    for number in numbers:
                        os.close(number)
                self.states.append(json.loads(text))

    def close(self) -> None:
        """Wait until all earlier connections are handled."""
        # This connection comes after them in the queue and sends nothing.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
            last.connect(str(self.path))
        self._thread.join(60)
        self._listening.close()


@contextmanager
def listening(path: Path) -> Iterator[Listener]:
    listener = Listener(path)
    try:
        yield listener
    finally:
        listener.close()


def profile(path: Path) -> dict[str, Any]:
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "listenerPath": str(path),
        "listenerMetadata": "for you",
        "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_NOTIFY"}],
    }


def test_the_listener_gets_the_state_and_the_descriptor(runtime: Runtime, tmp_path: Path) -> None:
    with listening(tmp_path / "s") as listener:
        box = runtime.box(
            "sh",
            "-c",
            "mkdir /dev/shm/x 2>/dev/null || echo refused",
            seccomp=profile(listener.path),
        )
        assert runtime("run", "--bundle", str(box.folder), box.id).ok().out == "refused\n"
    (process_state,) = listener.states
    assert listener.kinds == ["anon_inode:seccomp notify"]
    assert (
        process_state["fds"] == ["seccompFd"]
        and process_state["metadata"] == "for you"
        and process_state["pid"] > 0
    )
    assert process_state["state"]["id"] == box.id and process_state["state"]["status"] == "creating"
    assert process_state["state"]["bundle"] == str(box.folder)


def test_an_exec_gets_a_separate_listener_descriptor(runtime: Runtime, tmp_path: Path) -> None:
    with listening(tmp_path / "s") as listener:
        box = runtime.box("sleep", "60", seccomp=profile(listener.path)).up()
        pid = box.pid
        box.exec("true").ok()
    first, second = listener.states
    assert first["pid"] == pid != second["pid"]
    assert second["state"]["status"] == "running" and second["state"]["pid"] == pid


def test_create_fails_without_a_listener_for_notifications(
    runtime: Runtime, tmp_path: Path
) -> None:
    box = runtime.box("sleep", "60", seccomp=profile(tmp_path / "nobody"))
    box.create().fails()
    runtime("state", box.id).fails("does not exist")
