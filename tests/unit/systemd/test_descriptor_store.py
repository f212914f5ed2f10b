"""Tests descriptors in the service manager's store: received by the next process, and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.systemd.descriptor_store import receive, remove
from tests.support.service_manager import ServiceManager, manager

__all__ = ["manager"]

RECEIVE = """
import os, sys
from cri_server.systemd.descriptor_store import receive
found = receive(os.environ)
for name, fd in found.items():
    print(name, fd, os.get_inheritable(fd), os.fstat(fd).st_size if name.startswith("file") else "")
print(sorted(word for word in os.environ if word.startswith("LISTEN_")), \
len(os.listdir("/proc/self/fd")) - 1)
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(b"x" * 77)
    fd = os.open(tmp_path / "file", os.O_PATH)
    yield fd
    os.close(fd)


def started(manager: ServiceManager, **environment: str) -> list[str]:
    """Start the manager's next process; return what it reports about the descriptors that it
    gets."""
    command, fds, more = manager.starting([sys.executable, "-c", RECEIVE])
    done = subprocess.run(
        command,
        pass_fds=fds,
        env={**os.environ, **more, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return (done.stdout + done.stderr).splitlines()


def test_the_next_process_gets_stored_descriptors(manager: ServiceManager, file: int) -> None:
    for name in ("file-a", "file-b"):
        manager.keep(name, os.dup(file))
    assert started(manager) == ["file-a 3 False 77", "file-b 4 False 77", "[] 5"]


def test_a_removed_descriptor_is_not_returned(manager: ServiceManager, file: int) -> None:
    for name in ("file-a", "file-b"):
        manager.keep(name, os.dup(file))
    remove("file-a")
    remove("never")
    assert started(manager) == ["file-b 3 False 77", "[] 4"]


def test_a_name_has_a_single_descriptor(manager: ServiceManager, file: int) -> None:
    for _ in range(3):
        manager.keep("file", os.dup(file))
    assert started(manager) == ["file 3 False 77", "[] 4"]


def test_a_descriptor_without_a_name_is_called_unknown(manager: ServiceManager, file: int) -> None:
    manager.keep("x", os.dup(file))
    assert started(manager, LISTEN_FDNAMES="") == ["unknown 3 False ", "[] 4"]


def test_more_names_and_numbers_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cri_server.systemd.descriptor_store.FIRST_FD", 1 << 20)
    assert (
        receive({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}) == {}
    )
    assert "LISTEN_FDS: cannot take over descriptor 1048576 (a): " in caplog.text
    assert receive({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "two"}) == {}
    assert "LISTEN_FDS=two is not a number" in caplog.text


def test_descriptors_for_another_process_are_ignored() -> None:
    environment = {
        "LISTEN_PID": str(os.getppid()),
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "a",
        "HOME": "/",
    }
    assert receive(environment) == {} and environment == {"HOME": "/"}
    assert receive({}) == {}


def test_without_a_manager_nothing_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    remove("a")
