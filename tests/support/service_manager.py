"""Replaces systemd in tests: receives a service's notifications, and stores its descriptors for its
next start."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_MESSAGE_LIMIT_BYTES, _FDS_LIMIT = 4096, 8
_ABOVE = 100  # first number of stored descriptors: the next process gets them from 3 up


class ServiceManager:
    """A service manager during the `with` block. `limit` is FileDescriptorStoreMax=: further
    descriptors are closed without a message."""

    def __init__(self, folder: Path, limit: int = 512) -> None:
        self.address = folder / "notify"
        self._limit = limit
        self._store: list[tuple[str, int]] = []
        self._messages: list[str] = []

    def __enter__(self) -> ServiceManager:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self.address))
        return self

    def __exit__(self, *_: Any) -> None:
        self._hear()
        self._socket.close()
        for entry in self._store:
            os.close(entry[1])

    @property
    def store(self) -> dict[str, int]:
        """Return a dict: name -> stored descriptor."""
        self._hear()
        return dict(self._store)

    @property
    def messages(self) -> list[str]:
        """Return all messages that the service manager has received so far."""
        self._hear()
        return self._messages

    def keep(self, name: str, fd: int) -> None:
        """Store a descriptor as if the service had sent it. Closes `fd`."""
        self._hear()
        self._store.append((name, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)))
        os.close(fd)

    def starting(self, command: Sequence[str]) -> tuple[list[str], list[int], dict[str, str]]:
        """Return (command line, descriptors to inherit, environment) that start `command` with the
        stored descriptors at 3 and up."""
        names, fds = [name for name, _ in self._stored()], [fd for _, fd in self._stored()]
        moves = " ".join(f"{number}<&{fd} {fd}<&-" for number, fd in enumerate(fds, 3))
        listen = f"LISTEN_PID=$$ LISTEN_FDS={len(fds)} " if fds else ""
        environment = {"NOTIFY_SOCKET": str(self.address), "LISTEN_FDNAMES": ":".join(names)}
        return ["bash", "-c", f'{listen}exec "$@" {moves}', "bash", *command], fds, environment

    def _stored(self) -> list[tuple[str, int]]:
        self._hear()
        return self._store

    def _hear(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_LIMIT_BYTES, _FDS_LIMIT)
            except BlockingIOError:
                return
            self._messages.append(data.decode())
            words = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = words.get("FDNAME", "stored")
            for fd in fds:
                if words.get("FDSTORE") == "1" and len(self._store) < self._limit:
                    self._store.append((name, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)))
                os.close(fd)
            if words.get("FDSTOREREMOVE") == "1":
                for _, fd in [entry for entry in self._store if entry[0] == name]:
                    os.close(fd)
                self._store = [entry for entry in self._store if entry[0] != name]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceManager]:
    """Provide a service manager whose address is in this process's NOTIFY_SOCKET."""
    with ServiceManager(tmp_path) as running:
        monkeypatch.setenv("NOTIFY_SOCKET", str(running.address))
        yield running
