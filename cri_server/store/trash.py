"""Deletes folders in the background: moves each away at once, and deletes them one after the other.

A writable layer may have a million files. Neither the call that removes it nor the next start of a
pod waits for the deletion. The deleting thread has a low priority. A server deletes the folders
that its killed predecessor has left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from cri_server.images.waiting import in_thread
from cri_server.store.facts import entries
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)

MOST_WAITING = 256
NICE = 10
END_S = 5.0  # how long the server's end waits for a deletion
# After this time one thread deletes all folders that came meanwhile. So the calls of one burst do
# not compete with the thread for the interpreter: with 0.1 s, eight concurrent calls of
# RemovePodSandbox took 1.1 times as long.
TOGETHER_S = 0.5


class Trash:
    """Moves folders into the trash, a folder on the same file system, and deletes them there in the
    background. Use from one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._emptying: asyncio.Task[None] | None = None
        self._more = False  # folders were added since the thread began
        self._at_once = asyncio.Event()  # set while `wait_deleted` waits
        self._ended = threading.Event()
        # Folders whose deletion failed; the next server tries again.
        self._stuck: set[str] = set()

    def take(self, path: Path) -> None:
        """Move `path` to the trash for later deletion; does nothing if it is missing. If `path`
        cannot be moved, or `MOST_WAITING` folders are in the trash, deletes `path` at once, which
        blocks. Raises OSError."""
        try:
            # The deletion of a small layer took 2.6 of the 4.2 ms of RemoveContainer.
            if len(os.listdir(self._folder)) < MOST_WAITING:
                os.rename(path, self._folder / f"{path.name}.{os.urandom(4).hex()}")
                return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        except OSError as error:  # another file system, or a full one
            log.debug("cannot move %s to the trash, deleting it in place: %s", path, error)
        remove_path(path)

    def empty_soon(self) -> None:
        """Begin to delete everything in the trash, in the background."""
        self._more = True
        if self._emptying is None or self._emptying.done():
            self._emptying = asyncio.get_running_loop().create_task(self._empty())

    async def wait_deleted(self, timeout_s: float) -> list[str]:
        """Wait up to `timeout_s` until the trash is empty; return the names of folders that are
        left, for example because their deletion fails."""
        if self._emptying is not None:
            self._at_once.set()
            await asyncio.wait([self._emptying], timeout=timeout_s)
            self._at_once.clear()
        return sorted(entries(self._folder))

    async def close(self) -> None:
        """Wait up to `END_S` for the deletion, then stop it. The next server continues it."""
        await self.wait_deleted(END_S)
        self._ended.set()

    async def _empty(self) -> None:
        while self._more:
            with suppress(TimeoutError):
                async with asyncio.timeout(TOGETHER_S):
                    await self._at_once.wait()
            self._more = False
            await in_thread(self._delete_all, self._ended.set, END_S)

    def _delete_all(self) -> None:
        # Linux has a nice value for each thread, unlike POSIX (sched(7), "The nice value").
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # the thread's
        for name in entries(self._folder):
            if name not in self._stuck and not self._ended.is_set():
                self._delete(self._folder / name)

    def _delete(self, path: Path) -> None:
        try:
            remove_path(path)
        except OSError as error:
            log.warning("cannot delete %s: %s", path, error)
            self._stuck.add(path.name)
