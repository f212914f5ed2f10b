"""Plays the other end of --console-socket: receives the terminal's master and uses it."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Console:
    """A console socket; `master` is set once the runtime has sent it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(1)
        self._master = -1
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        self._listening.settimeout(60)
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        with connection:
            _, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4))
            for _, _, content in ancillary:
                self._master = array.array("i", content)[0]

    @property
    def master(self) -> int:
        self._thread.join(60)
        assert self._master >= 0, "no terminal arrived"
        return self._master

    def write(self, text: bytes) -> None:
        os.write(self.master, text)

    def read_until(self, text: bytes, timeout_s: float = 60.0) -> bytes:
        """Read the terminal's output up to `text`, or up to its end."""
        received, deadline = b"", time.monotonic() + timeout_s
        while text not in received:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, received
            try:
                chunk = os.read(self.master, 4096)
            except OSError:  # EIO: the other side is closed
                break
            received += chunk
        return received

    def close(self) -> None:
        # the thread waits in accept(2), which close(2) would not end
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
                last.connect(str(self.path))
        self._thread.join(60)
        self._listening.close()
        if self._master >= 0:
            os.close(self._master)


@contextmanager
def receive_terminal(path: Path) -> Iterator[Console]:
    console = Console(path)
    try:
        yield console
    finally:
        console.close()
