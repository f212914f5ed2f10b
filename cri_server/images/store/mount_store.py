"""Stores the mounts of images in the keeper, a process that outlives the server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from cri_server.systemd import descriptor_store
from pyrunc.errors import Error, Unavailable
from pyrunc.keeper.client import Keeper, NoKeeper
from pyrunc.kernel.fd import close_all

log = logging.getLogger(__name__)

PREFIX = "image/"
"""The prefix of the names of the keeper's entries for mounts. Such an entry has one descriptor and
no data."""
MOST = 1024
"""The largest number of stored mounts. It leaves room in the keeper for the entries of pods."""


class MountStore:
    """Stores mounts of images in the keeper, by name, and returns the mounts that earlier servers
    have stored. Thread-safe."""

    def __init__(
        self, folder: Path | None = None, received: Mapping[str, int] | None = None
    ) -> None:
        """`folder`: the keeper's folder, None to store nothing. `received`: mounts by name, from
        systemd's descriptor store for this unit, where earlier versions stored them."""
        self._keeper = None if folder is None else Keeper(folder)
        self._received = dict(received or {})
        self._stored: set[str] = set()
        self._lock = threading.Lock()

    def take(self) -> dict[str, int]:
        """Return name and descriptor of each mount that earlier servers have stored. The caller
        must close the descriptors, and `remove` the mounts that it does not use. Removes the mounts
        of earlier versions from systemd's descriptor store."""
        taken: dict[str, int] = {}
        for name, fd in self._received.items():
            descriptor_store.remove(name)
            # systemd's descriptor store has the name image-CHAIN_ID-DIGEST.
            taken[PREFIX + name.rpartition("-")[2]] = fd
        self._received.clear()
        for name, fd in self._take_from_keeper().items():
            if name in taken:
                os.close(taken[name])
            taken[name] = fd
        return taken

    def _take_from_keeper(self) -> dict[str, int]:
        taken: dict[str, int] = {}
        if self._keeper is None:
            return taken
        # The keeper accepts a limited number of connections. The next call connects again.
        with self._lock, closing(self._keeper):
            try:
                for name in self._keeper.names(PREFIX):
                    entry = self._keeper.get(name)
                    if entry is None:
                        continue
                    if len(entry.fds) == 1:
                        taken[name] = entry.fds[0]
                    else:
                        close_all(entry.fds)
            except NoKeeper:
                pass  # the first server after a boot: no mount is stored
            except Error as error:
                log.info("cannot take over stored mounts of images: %s", error)
            self._stored.update(taken)
        return taken

    def put(self, name: str, fd: int) -> None:
        """Store a copy of the mount's descriptor in the keeper. If that fails, log it: the next
        server will then mount the image again."""
        if self._keeper is None:
            return
        with self._lock, closing(self._keeper):
            if len(self._stored - {name}) >= MOST:
                return
            try:
                self._keeper.put(name, b"", [fd])
                self._stored.add(name)
            except Unavailable as error:  # it is put when the keeper has been started
                log.debug("%s", error)
            except Error as error:
                log.warning("cannot store the mount of an image in the keeper: %s", error)

    def remove(self, name: str) -> None:
        """Remove the mount `name` from the keeper, if it is there."""
        if self._keeper is None:
            return
        with self._lock, closing(self._keeper):
            self._stored.discard(name)
            try:
                self._keeper.drop(name)
            except Error as error:
                log.debug("%s", error)
