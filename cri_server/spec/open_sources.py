"""Opens the host paths that are sources of a container's mounts. Each path is opened once, as an
O_PATH descriptor.

A path may lie on storage that never answers, so a thread with a deadline opens it
(`spec.sources.run_with_deadline`). A path may also change after a check, so the container is
compiled from the descriptor, and from facts that were read through the descriptor.
"""

from __future__ import annotations

import os
import threading
from typing import Self

from pyrunc.compile.bind_source import BindSource, bind_failed, describe_source, open_source
from pyrunc.errors import WrongState
from pyrunc.kernel.fd import close_all


class OpenSources:
    """The opened sources of one container's mounts, by their paths in the spec. Owns the
    descriptors until `close`.

    A thread adds the sources. If the thread was abandoned after its deadline and returns after
    `close`, it closes the descriptor that it has opened, and ends.
    """

    def __init__(self) -> None:
        self.facts: dict[str, BindSource] = {}
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
        """Return the text `path '/the/path'` with the path that is being opened, for the message of
        a missed deadline."""
        return f"path {self.current!r}"

    def begin(self, path: str) -> None:
        """Record that `path` is being opened; `subject` then names it. Raises WrongState after
        `close`."""
        if self._closed:
            raise WrongState(f"{path} was not opened: the request has ended")
        self.current = path

    def open(self, source: str, destination: str, *, links: bool) -> None:
        """Open the source of one bind mount and add its descriptor. Follows symlinks only if
        `links` is true. Raises KernelError (also for a symlink that it must not follow), and
        WrongState after `close`."""
        self.begin(source)
        number = open_source(source, destination, links=links)
        self.add(source, destination, number, "" if links else source)

    def add(self, source: str, destination: str, number: int, path: str) -> None:
        """Take ownership of the source's descriptor `number`, and read the facts about the source.
        `path`: the source's real path, empty if unknown. Raises KernelError, WrongState after
        `close`."""
        try:
            source_facts = describe_source(number, path)
        except OSError as error:
            os.close(number)
            raise bind_failed(source, destination, error.errno or 0) from None
        with self._lock:
            if not self._closed and source not in self.fds:
                self.facts[source], self.fds[source] = source_facts, number
                return
        os.close(number)
        if self._closed:
            raise WrongState(f"{source} was not opened: the request has ended")
