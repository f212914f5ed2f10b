"""Host paths that a container's mounts have as sources: opened once, and handed on as O_PATH
descriptors.

A path may lie on storage that never answers, and may change between two looks. So a thread that can
be given up (`spec.sources.in_time`) opens it; what compiles the container gets the descriptor and
what is known of it.
"""

from __future__ import annotations

import os
import threading
from typing import Self

from pyrunc.compile.bind_source import bind_failed, look_at, open_source
from pyrunc.errors import WrongState
from pyrunc.ipc import close_all
from pyrunc.plan.bind_source import BindSource


class OpenSources:
    """The sources of one container's mounts by their paths in its specification. Owns the
    descriptors until `close`.

    A thread adds to it. One that was given up may come back after `close`: then what it has opened
    is closed, and it ends.
    """

    def __init__(self) -> None:
        self.known: dict[str, BindSource] = {}
        self.fds: dict[str, int] = {}
        self.current = ""
        self._closed = False
        self._lock = threading.Lock()  # held for no system call that can hang

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            fds, self.fds = list(self.fds.values()), {}
        close_all(fds)

    def subject(self) -> str:
        """The path that is being looked at, for an error."""
        return f"path {self.current!r}"

    def begin(self, path: str) -> None:
        """From here on the error of a deadline names this path. Raises WrongState after `close`."""
        if self._closed:
            raise WrongState(f"{path} is not needed any more")
        self.current = path

    def open(self, source: str, destination: str, *, links: bool) -> None:
        """Open the source of one bind. Raises KernelError, WrongState."""
        self.begin(source)
        number = open_source(source, destination, links=links)
        self.add(source, destination, number, "" if links else source)

    def add(self, source: str, destination: str, number: int, path: str) -> None:
        """Take the descriptor of a source, and look at what it is. `path`: see `look_at`. Raises
        KernelError, WrongState."""
        try:
            source_facts = look_at(number, path)
        except OSError as error:
            os.close(number)
            raise bind_failed(source, destination, error.errno or 0) from None
        with self._lock:
            if not self._closed and source not in self.fds:
                self.known[source], self.fds[source] = source_facts, number
                return
        os.close(number)
        if self._closed:
            raise WrongState(f"{source} is not needed any more")
