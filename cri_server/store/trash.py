"""Folders that nobody needs any more: moved away at once, deleted one after another while the
server does other things.

A writable layer may hold a million files, and its owner's removal does not wait for them; nor does
the next start of a pod, as the thread that deletes has a low priority. What a server that was
killed has left here, the next one deletes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

from cri_server.images.waiting import in_thread
from cri_server.store.facts import entries
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)

MOST_WAITING = 64
NICE = 10
END_S = 5.0  # so long an end of the server waits for what is being deleted


class Trash:
    """One folder, on the file system of what is thrown away. Use from one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._emptying: asyncio.Task[None] | None = None
        self._more = False  # came since the thread began
        self._ended = threading.Event()
        self._stuck: set[str] = set()  # not tried again before the next start

    def take(self, path: Path) -> None:
        """Move `path` here, or delete it where that does not work or too much waits. Fine when it
        is gone. Blocking. Raises OSError, as `remove_tree`."""
        try:
            if len(os.listdir(self._folder)) < MOST_WAITING:
                os.rename(path, self._folder / f"{path.name}.{os.urandom(4).hex()}")
                return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        except OSError as error:  # another file system, a full one
            log.debug("%s is deleted where it is: %s", path, error)
        remove_path(path)

    def empty_soon(self) -> None:
        """Delete what is here, in the background."""
        self._more = True
        if self._emptying is None or self._emptying.done():
            self._emptying = asyncio.get_running_loop().create_task(self._empty())

    async def settle(self, timeout_s: float) -> list[str]:
        """Wait until what can be deleted is; the names of what is still here."""
        if self._emptying is not None:
            await asyncio.wait([self._emptying], timeout=timeout_s)
        return sorted(entries(self._folder))

    async def close(self) -> None:
        """The server ends: what is left is the next one's."""
        await self.settle(END_S)
        self._ended.set()

    async def _empty(self) -> None:
        while self._more:
            self._more = False
            await in_thread(self._delete_all, self._ended.set, END_S)

    def _delete_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # the thread's
        for name in entries(self._folder):
            if name not in self._stuck and not self._ended.is_set():
                self._delete(self._folder / name)

    def _delete(self, path: Path) -> None:
        try:
            remove_path(path)
        except OSError as error:
            log.warning("%s cannot be deleted: %s", path, error)
            self._stuck.add(path.name)
