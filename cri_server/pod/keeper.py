"""The server's side of the keeper (`pyrunc.keeper.client`): the entries of pods, and a watch that
starts the keeper, and another one when it has died.

The shims fill a new one again; zygote and shims are replaced, so that the next pods' shims are
below it. The orphans of shims from before have another ancestor: how they end is known from Linux
6.15 on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pyrunc.errors import Error, Unavailable
from pyrunc.keeper.client import Keeper, ensure
from pyrunc.shim.messages import StoredContainer, StoredPause

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # between attempts to start a keeper
KINDS = ("pod", "container")  # of entries; the others are mounts of images
TRIES, TRY_AGAIN_S = 5, 0.2  # while the keeper is stopped or being replaced


class StoredPods:
    """The entries that shims have put into the keeper of `folder`, by the ids of sandboxes (their
    pause processes) and of containers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def ids(self, tries: int = TRIES) -> set[str]:
        """Return the ids of all entries; none when there is no keeper after so many tries."""
        return await asyncio.to_thread(self._ids, tries)

    async def drop(self, *ids: str) -> None:
        """Drop the entries of these ids. Does nothing without entries or without a keeper."""
        if ids:
            await asyncio.to_thread(self._drop, ids)

    async def open_pause(self, sandbox_id: str) -> tuple[StoredPause, list[int]]:
        """Return the record of a pod's pause process and its descriptors, the caller's to close.
        Raises Unavailable, Error."""
        return await asyncio.to_thread(self._open_pause, sandbox_id)

    def _open_pause(self, sandbox_id: str) -> tuple[StoredPause, list[int]]:
        keeper = Keeper(self._folder)
        try:
            entry = keeper.get(StoredPause.name_of(sandbox_id))
        finally:
            keeper.close()
        if entry is None:
            raise Unavailable(f"the keeper has nothing of sandbox {sandbox_id}")
        return entry.read(StoredPause)

    def _ids(self, tries: int) -> set[str]:
        for number in range(tries):
            time.sleep(TRY_AGAIN_S if number else 0)
            keeper = Keeper(self._folder)
            try:
                entries = [name.partition("/") for name in keeper.names()]
                return {entry[2] for entry in entries if entry[0] in KINDS}
            except Unavailable as error:
                log.info("%s", error)
            except Error as error:
                log.error("%s", error)
                break
            finally:
                keeper.close()
        return set()

    def _drop(self, ids: tuple[str, ...]) -> None:
        keeper = Keeper(self._folder)
        try:
            for identifier in ids:
                keeper.drop(StoredPause.name_of(identifier))
                keeper.drop(StoredContainer.name_of(identifier))
        except Error as error:
            log.info("%s", error)
        finally:
            keeper.close()


class KeeperWatch:
    """Holds a connection to the keeper of `folder`. `on_keeper` is called with each keeper: True
    when it has taken the place of another one."""

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
        """Start the keeper if it does not live, and watch it, in the background."""
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
        """Handle the end of the connection: the keeper has died, or another client has replaced
        this one."""
        self._disconnect()
        self.begin()

    async def _connect(self) -> None:
        while True:
            try:
                keeper = await asyncio.to_thread(ensure, self._folder)
                pid = await asyncio.to_thread(keeper.hello)
                break
            except Error as error:
                log.warning("no keeper: %s", error)
                await asyncio.sleep(AGAIN_S)
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
            log.error("no shims below the new keeper: %s", error)
