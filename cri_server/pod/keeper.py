"""Starts the keeper, starts a new one when it has died, and reads its entries about pods
(`pyrunc.keeper.client`).

When a keeper has died, the shims send their entries to its successor. The server also replaces its
zygote and shims, so that the processes of new pods descend from the new keeper: if their shim dies,
the keeper reaps them. Containers of the old shims do not descend from the new keeper: if an old
shim dies, the exit codes of its containers can be read only on Linux 6.15 or newer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from pyrunc.errors import Error, Unavailable
from pyrunc.keeper.client import Keeper, NoKeeper, ensure
from pyrunc.shim.messages import StoredContainer, StoredPause

log = logging.getLogger(__name__)

RETRY_S = 5.0  # between attempts to start a keeper
KINDS = ("pod", "container")  # entries of other kinds are mounts of images
ATTEMPTS, ATTEMPT_INTERVAL_S = 5, 0.2  # while the keeper is stopped or being replaced


class StoredPods:
    """The entries that shims have stored in the keeper, whose socket is in `folder`. The entry of a
    pause process has the sandbox's id, the entry of a container has the container's id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def ids(self, tries: int = ATTEMPTS) -> set[str]:
        """Return the ids of all entries; an empty set if no keeper answers in `tries` attempts.
        Raises OSError when this process has too many open descriptors."""
        return await asyncio.to_thread(self._ids, tries)

    async def drop(self, *ids: str) -> None:
        """Drop the entries of these sandboxes and containers. Ignores missing entries, and does
        nothing without a keeper."""
        if ids:
            await asyncio.to_thread(self._drop, ids)

    async def open_pause(self, sandbox_id: str) -> tuple[StoredPause, list[int]]:
        """Return the keeper's entry of a pod's pause process, and its descriptors, which the caller
        closes. Raises Unavailable if no keeper answers or the keeper has no such entry, PeerError
        for a malformed entry."""
        return await asyncio.to_thread(self._open_pause, sandbox_id)

    def _open_pause(self, sandbox_id: str) -> tuple[StoredPause, list[int]]:
        with closing(Keeper(self._folder)) as keeper:
            entry = keeper.get(StoredPause.name_of(sandbox_id))
        if entry is None:
            raise Unavailable(f"the keeper stores no pause process of sandbox {sandbox_id}")
        return entry.read(StoredPause)

    def _ids(self, tries: int) -> set[str]:
        for number in range(tries):
            time.sleep(ATTEMPT_INTERVAL_S if number else 0)
            try:
                with closing(Keeper(self._folder)) as keeper:
                    entries = [name.partition("/") for name in keeper.names()]
                return {entry[2] for entry in entries if entry[0] in KINDS}
            except Unavailable as error:
                # The first server after a boot finds no keeper.
                log.log(logging.DEBUG if isinstance(error, NoKeeper) else logging.INFO, "%s", error)
                # Raises OSError if this process may open no more descriptors: then an empty set
                # would be wrong.
                os.close(os.open("/", os.O_PATH | os.O_CLOEXEC))
            except Error as error:
                log.error("%s", error)
                break
        return set()

    def _drop(self, ids: tuple[str, ...]) -> None:
        try:
            with closing(Keeper(self._folder)) as keeper:
                for identifier in ids:
                    keeper.drop(StoredPause.name_of(identifier))
                    keeper.drop(StoredContainer.name_of(identifier))
        except Error as error:
            log.info("%s", error)


class KeeperWatch:
    """Starts the keeper, whose socket is in `folder`, and starts a new keeper when it dies. Calls
    `on_keeper(replaced)` after each start. `replaced`: the keeper replaces one that has died."""

    def __init__(self, folder: Path, on_keeper: Callable[[bool], Awaitable[None]]) -> None:
        self._folder, self._on_keeper = folder, on_keeper
        self._keeper: Keeper | None = None
        self._pid = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Return the keeper's pid; 0 while there is none."""
        return self._pid if self._keeper else 0

    def begin(self) -> None:
        """Start the keeper if it does not run, and watch it, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def close(self) -> None:
        """Stop watching the keeper, which continues."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._disconnect()

    def _disconnect(self) -> None:
        if self._keeper is not None:
            asyncio.get_running_loop().remove_reader(self._keeper.fileno())
            self._keeper.close()
            self._keeper = None

    def _lost(self) -> None:
        """Connect to the keeper again after the connection has ended: either the keeper has died,
        or it has closed this connection because another client needed it."""
        self._disconnect()
        self.begin()

    async def _connect(self) -> None:
        while True:
            try:
                keeper = await asyncio.to_thread(ensure, self._folder)
                pid = await asyncio.to_thread(keeper.hello)
                break
            except Error as error:
                log.warning("cannot start the keeper: %s", error)
                await asyncio.sleep(RETRY_S)
        before, self._pid, self._keeper = self._pid, pid, keeper
        asyncio.get_running_loop().add_reader(keeper.fileno(), self._lost)
        # With the same pid the keeper has only closed this connection, to make room for others.
        if before == pid:
            return
        if before:
            log.warning("the keeper %d has died; %d has taken its place", before, pid)
        try:
            await self._on_keeper(bool(before))
        except Error as error:
            log.error("cannot start shims below the new keeper: %s", error)
