"""A shim's connection to the keeper, a process that stores entries (`messages.StoredPause`,
`StoredContainer`) from which another shim can take the pods over. The keeper also reports the wait
statuses of processes that are not the shim's children.

The server replaces a keeper that was killed, and each shim stores its entries in the new one.
Without a keeper, pods run, but end with their shim.
"""

from __future__ import annotations

import os

from pyrunc import ipc
from pyrunc.errors import Error, KernelError, NotFound, Unavailable, Unsupported, WrongState
from pyrunc.keeper.client import Keeper
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import wait_status
from pyrunc.shim.loop import READABLE
from pyrunc.shim.warn import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from pyrunc.records import Record
    from pyrunc.shim.loop import EventLoop, Timer

    Source = Callable[[], tuple[Record, list[int]]]
    Result = TypeVar("Result")
    Stored = TypeVar("Stored", bound=Record)

# Less than the client's default of 2 s: the shim has one thread, so all its pods wait meanwhile.
TIMEOUT_S = 0.5
# A new keeper listens some milliseconds after the old one was killed. Until it has the entries,
# only the shim has the descriptors, so the first attempt comes soon.
AGAIN_S, LONGEST_AGAIN_S = 0.01, 30.0
"""The shortest and the longest time from a lost connection to the next attempt. The time doubles
with each attempt that fails."""


class KeeperLink:
    """The shim's connection to the keeper in `folder`. Without a folder there is no keeper, and
    nothing is stored."""

    def __init__(self, loop: EventLoop, folder: str | None) -> None:
        self._loop = loop
        self._keeper = None if folder is None else Keeper(folder, TIMEOUT_S, on_close=loop.unwatch)
        self._sources: dict[str, Source] = {}
        self._unsent: set[str] = set()
        self._undropped: set[str] = set()
        self._again: Timer | None = None
        self._again_s = AGAIN_S

    # -- descriptors

    def put(self, name: str, source: Source) -> None:
        """Store an entry under `name` in the keeper, and again in each new keeper, until `drop`. If
        the keeper does not answer, the entry is sent later.

        `source()` returns the entry's fields and descriptors; this method closes the descriptors.
        If `source` raises WrongState, because the process has ended, nothing is stored.
        """
        self._sources[name] = source
        self._unsent.add(name)
        self._undropped.discard(name)
        self._send()

    def drop(self, name: str) -> None:
        """Remove the entry `name` from the keeper. Does nothing if `put` has not stored it."""
        if self._sources.pop(name, None) is not None:
            self._unsent.discard(name)
            self._undropped.add(name)
            self._send()

    def get(self, name: str, kind: type[Stored]) -> tuple[Stored, list[int]]:
        """Return the fields and the descriptors of an entry that another shim has stored. The
        caller closes the descriptors. Raises NotFound, Unavailable, Error."""
        entry = self._call(lambda keeper: keeper.get(name))
        if entry is None:
            raise NotFound(f"the keeper stores no {name}")
        return entry.read(kind)

    # -- exits

    def exit_status(self, pid: int, start_time: int, pidfd: int) -> int | None:
        """Return the wait status (wait(2)) of a process that is not our child, from the kernel or
        from the keeper. None if the process runs, or if its wait status is unknown."""
        status = wait_status(pid, start_time, pidfd)
        if status is not None:
            return status
        try:
            record = self._call(lambda keeper: keeper.exit_of(pid, start_time))
        except Error:
            return None
        return None if record is None else record.status

    def note_exit(self, pid: int, start_time: int, status: int) -> None:
        """Store the wait status of our child in the keeper. If this shim is killed before it has
        written exit.json, the shim that takes over reads the status."""
        try:
            self._call(lambda keeper: keeper.post_note(pid, start_time, status))
        except Error:  # the kernel may still have the status
            pass

    # -- the connection

    def _send(self) -> None:
        """Send the pending puts and drops; try again later if the keeper does not answer."""
        if self._keeper is None:
            return
        try:
            self._connect()  # if the keeper is new, this adds all names to `_unsent`
            for name in list(self._undropped):
                self._drop(name)
            # Not a `for`: `_put` may connect again, which adds all names again.
            while self._unsent:
                self._put(next(iter(self._unsent)))
        except Unavailable:
            self._send_later()
        except Unsupported as error:
            warn(str(error))
        else:
            self._again_s = AGAIN_S

    def _drop(self, name: str) -> None:
        self._call(lambda keeper: keeper.post_drop(name))
        self._undropped.discard(name)

    def _put(self, name: str) -> None:
        try:
            record, fds = self._sources[name]()
        except WrongState:  # it has ended, and is dropped soon
            self._unsent.discard(name)
            return
        except OSError as error:  # too many open descriptors
            warn(f"cannot store {name} in the keeper, trying again: {error}")
            raise Unavailable(str(error)) from None
        try:
            data = ipc.encode(record.to_fields())
            self._call(lambda keeper: keeper.post_put(name, data, fds))
        except KernelError as error:
            warn(f"the keeper refused {name}, which will be lost when this shim ends: {error}")
        finally:
            close_all(fds)
        self._unsent.discard(name)

    def _call(self, operation: Callable[[Keeper], Result]) -> Result:
        """Run an operation on the keeper. Raises Unavailable, Error.

        If the connection is lost, connect again and repeat the operation once: the keeper closes
        idle connections to make room for other clients.
        """
        if self._keeper is None:
            raise Unavailable("this shim was started without a keeper")
        try:
            self._connect()
            return operation(self._keeper)
        except Unavailable:
            self._connect()
            return operation(self._keeper)

    def _connect(self) -> None:
        assert self._keeper is not None
        if self._keeper.fileno() >= 0:
            return
        self._keeper.hello()
        # The keeper is new, or messages were lost with the old connection.
        self._unsent = set(self._sources)
        if self._unsent:
            self._send_later()
        self._loop.watch(self._keeper.fileno(), READABLE, self._readable)

    def _readable(self, events: int) -> None:
        """Read what the keeper has sent: refusals of entries, or the end of the connection."""
        assert self._keeper is not None
        try:
            refused = self._keeper.collect()
        except Unavailable:
            self._send_later()
            return
        for number in refused:
            warn(f"the keeper has refused an entry: {os.strerror(number)}")

    def _send_later(self) -> None:
        if self._again is None:
            self._again = self._loop.after(self._again_s, self._send_again)
            self._again_s = min(self._again_s * 2, LONGEST_AGAIN_S)

    def _send_again(self) -> None:
        self._again = None
        self._send()
