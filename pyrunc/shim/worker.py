"""Runs work that waits for other processes (hooks, a seccomp agent, systemd) in a fork of the shim.
The kernel kills the fork when the shim ends.

The shim serves its other containers meanwhile. A container that the fork starts is first the fork's
child. When the fork ends, the container becomes the child of the shim, which is a subreaper.
"""

from __future__ import annotations

import os
import signal
from _socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair

from pyrunc import ipc
from pyrunc.errors import Error, Unavailable, error_of, to_error
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.reaper import set_parent_death_signal
from pyrunc.shim.loop import READABLE
from pyrunc.shim.warn import warn
from pyrunc.zygote import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from pyrunc.shim.loop import EventLoop
    from pyrunc.shim.reaper import Reaper


class WorkerLost(Unavailable):
    """A worker ended without an answer. Its work may be half done."""


class Worker:
    """A fork of the shim that runs `work()`.

    - `on_done(fields, descriptors)`: is called with the result
    - `on_failed(error)`: is called with the error
    """

    def __init__(
        self,
        loop: EventLoop,
        reaper: Reaper,
        not_inherited: Sequence[int],
        work: Callable[[], tuple[dict[str, Any], Sequence[int]]],
        on_done: Callable[[dict[str, Any], list[int]], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._loop, self._reaper = loop, reaper
        self._on_done, self._on_failed = on_done, on_failed
        self._answer, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        shim = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _work(shim, work, theirs, not_inherited)
        # While this copy is open, the end of a killed fork is not seen here.
        theirs.close()
        reaper.hold()  # the container may end before its pid is known here
        loop.watch(self._answer.fileno(), READABLE, self._answered)

    def kill(self) -> None:
        """Kill the fork and its descendants, such as the launcher and hooks. The event loop then
        calls `on_failed`."""
        descendants.kill(self.pid)

    def _answered(self, events: int) -> None:
        try:
            received = ipc.receive(self._answer)
        except (OSError, Error) as error:
            warn(f"cannot read a worker's answer: {error}")
            received = None
        self._loop.unwatch(self._answer.fileno())
        self._answer.close()
        try:
            if received is None:
                self._on_failed(WorkerLost("the process that was starting it was killed"))
                return
            message, fds = received
            if "error" in message:
                close_all(fds)
                self._on_failed(error_of(message["error"]))
            else:
                self._on_done(message["ok"], fds)
        finally:
            self._reaper.let_go()


def _work(
    shim: int,
    work: Callable[[], tuple[dict[str, Any], Sequence[int]]],
    answer: socket,
    not_inherited: Sequence[int],
) -> NoReturn:
    """Run the work in the fork, send its result and exit."""
    try:
        set_parent_death_signal(signal.SIGKILL, shim)
        # A copy in the fork would keep a client's connection open after the shim has closed it.
        close_all(not_inherited)
        # Otherwise signals of the fork would wake up the shim, by the pipe that both share.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            fields, fds = work()
            ipc.send(answer, {"ok": fields}, fds)
        except Exception as error:
            ipc.send(answer, {"error": to_error(error, "start").to_fields()})
    finally:
        os._exit(0)
