"""Passes an image's tars to the index builder while they are written, so that the index can be
begun before they are complete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress


class PartialTars:
    """Holds a descriptor of each tar, by diff id, and a pipe that notifies the tars' reader when
    they grow (`tar_file.Growth`). The caller calls `close` at the end."""

    def __init__(self, diff_ids: Iterable[str]) -> None:
        self._fds: dict[str, int | None] = dict.fromkeys(diff_ids)
        self._all_begun, self._has_grown = asyncio.Event(), asyncio.Event()
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writing, False)
        self.replaced = False

    def add(self, diff_id: str, fd: int) -> None:
        """Take over the descriptor `fd` of a tar that is being written. When a tar is written
        again, its second descriptor is closed at once, and `replaced` is set: an index made from
        the first descriptor must not be used."""
        if self._fds[diff_id] is not None:
            self.replaced = True
            os.close(fd)
            return
        self._fds[diff_id] = fd
        if None not in self._fds.values():
            self._all_begun.set()

    def notify(self) -> None:
        """Notify the reader that a tar has grown."""
        self._has_grown.set()
        if self._writing >= 0:
            with suppress(BlockingIOError):  # the pipe is full: a notification is pending
                os.write(self._writing, b".")

    @property
    def is_finished(self) -> bool:
        """Return whether all tars are complete."""
        return self._writing < 0

    def finish(self) -> None:
        """Close the pipe, which tells the reader that all tars are complete. Idempotent."""
        self._has_grown.set()
        writing, self._writing = self._writing, -1
        if writing >= 0:
            os.close(writing)

    async def fds(self) -> list[int]:
        """Wait until all tars have been added and one has grown. Return the descriptors of the pipe
        and of the tars, in the order of `diff_ids`; `close` closes them."""
        await self._all_begun.wait()
        # A reader without data would take a processor from the jobs that start to write.
        await self._has_grown.wait()
        return [self._reading, *(fd for fd in self._fds.values() if fd is not None)]

    def close(self) -> None:
        """Close the pipe and the tars' descriptors. The caller must wait until the reader has
        ended."""
        self.finish()
        for fd in (self._reading, *self._fds.values()):
            if fd is not None:
                os.close(fd)
