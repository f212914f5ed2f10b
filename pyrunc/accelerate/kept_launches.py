"""Launches of commands that enter a container again and again, as probes do: made once, carried out many times.

A launch of an exec holds no pid. It has three descriptors: its program and its words, which are sealed, and the container's cgroup.
It can be carried out again as long as all that it was made from is the same, which is the asker's `key`. Only a command that is
asked for a second time is kept, so that those that come once take no memory.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable

from pyrunc.compiler.client import CompiledLaunch

MOST, MOST_SEEN = 256, 1024


class KeptLaunches:
    """Of the containers of one server, by container and key. What was not used for longest goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, Hashable], CompiledLaunch] = OrderedDict()
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()

    def find(self, container: str, key: Hashable) -> CompiledLaunch | None:
        """A copy, the caller's to close."""
        kept = self._kept.get((container, key))
        if kept is None:
            return None
        self._kept.move_to_end((container, key))
        return CompiledLaunch(kept.compiled, [os.dup(fd) for fd in kept.fds])

    def keep(self, container: str, key: Hashable, launch: CompiledLaunch) -> None:
        """Have a copy, if this was asked for before."""
        seen = (container, hash(key))
        if seen not in self._seen:
            self._seen[seen] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            return
        self._forget((container, key))
        self._kept[container, key] = CompiledLaunch(launch.compiled, [os.dup(fd) for fd in launch.fds])
        if len(self._kept) > MOST:
            self._forget(next(iter(self._kept)))

    def drop(self, container: str) -> None:
        """The container has ended, or a launch did not do; fine when nothing is kept."""
        for place in [place for place in self._kept if place[0] == container]:
            self._forget(place)

    def close(self) -> None:
        """Give all back."""
        while self._kept:
            self._forget(next(iter(self._kept)))

    def _forget(self, place: tuple[str, Hashable]) -> None:
        kept = self._kept.pop(place, None)
        if kept is not None:
            kept.close()
