"""The server's watch over the keeper (`pyrunc.keeper.client`): one that has died is replaced.

The shims fill a new one again; the zygote is replaced, so that the next shims are below it. The orphans of shims from before have
another ancestor: how they end is known from Linux 6.15 on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from pyrunc.errors import Error
from pyrunc.keeper.client import Keeper, ensure

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # after one could not be started


class KeeperWatch:
    """Holds a connection to the keeper of `folder`. `on_replaced` is called when another one has taken its place."""

    def __init__(self, folder: Path, on_replaced: Callable[[], Awaitable[None]]) -> None:
        self._folder, self._on_replaced = folder, on_replaced
        self._keeper: Keeper | None = None
        self._pid = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The keeper's; 0 while there is none."""
        return self._pid if self._keeper else 0

    def begin(self) -> None:
        """Start the keeper if it does not live, and watch it, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def close(self) -> None:
        """Watch it no longer; it stays."""
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
        """It has died, or has made room for another connection."""
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
        if before not in (0, pid):
            log.warning("the keeper %d has died; %d has taken its place", before, pid)
            try:
                await self._on_replaced()
            except Error as error:
                log.error("no zygote below the new keeper: %s", error)
