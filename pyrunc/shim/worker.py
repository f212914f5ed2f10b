"""Starting a container is the work of a fork of the shim, which ends when the container runs.

Two reasons. A start dirties some two megabytes of an interpreter's heap, which would stay with the shim for the pod's life.
And it may take long: hooks, a slow disk, while the pod's other containers want their output read. The container is the
fork's child first and becomes ours, a subreaper's, when the fork ends.
"""

from __future__ import annotations

import os
import signal
import sys
from _socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair

from pyrunc import wire
from pyrunc.errors import Error, KernelError, from_wire
from pyrunc.kernel.reaper import set_parent_death_signal
from pyrunc.shim.loop import READABLE
from pyrunc.zygote import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from pyrunc.shim.loop import Loop
    from pyrunc.shim.reaper import Reaper

    Result = tuple[dict[str, Any], list[int]]


class WorkerLost(Error):
    """A worker ended without an answer; what it had made so far may be left."""


class Worker:
    """A fork that runs `work()`; its result, fields and descriptors, goes to `on_done`, or its error to `on_failed`."""

    def __init__(
        self,
        loop: Loop,
        reaper: Reaper,
        not_inherited: Sequence[int],
        work: Callable[[], tuple[dict[str, Any], Sequence[int]]],
        on_done: Callable[[dict[str, Any], list[int]], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._loop, self._reaper = loop, reaper
        self._on_done, self._on_failed = on_done, on_failed
        self._answer, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _work(work, theirs, not_inherited)
        theirs.close()
        reaper.hold()  # what the fork leaves us may end before we hear its pid
        loop.watch(self._answer.fileno(), READABLE, self._answered)

    def kill(self) -> None:
        """Give up, with the launcher and the hooks that it started; `on_failed` will hear of it."""
        descendants.kill(self.pid)

    def _answered(self, events: int) -> None:
        try:
            received = wire.receive(self._answer)
        except (OSError, Error) as error:
            print(f"pyrunc-shim: a worker's answer: {error}", file=sys.stderr)
            received = None
        self._loop.unwatch(self._answer.fileno())
        self._answer.close()
        try:
            if received is None:
                self._on_failed(WorkerLost("the process that was starting it was killed"))
                return
            message, fds = received
            if "error" in message:
                wire.close_all(fds)
                self._on_failed(from_wire(message["error"]))
            else:
                self._on_done(message["ok"], fds)
        finally:
            self._reaper.let_go()


def _work(
    work: Callable[[], tuple[dict[str, Any], Sequence[int]]], answer: socket, not_inherited: Sequence[int]
) -> NoReturn:
    """With the shim dead nobody would hold what is started: then this ends too."""
    try:
        set_parent_death_signal(signal.SIGKILL)
        wire.close_all(not_inherited)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            fields, fds = work()
            wire.send(answer, {"ok": fields}, fds)
        except Error as error:
            wire.send(answer, {"error": error.to_wire()})
        except OSError as error:
            failed = KernelError("start", error.filename or "", error.errno or 0, error.strerror or "")
            wire.send(answer, {"error": failed.to_wire()})
        except Exception as error:
            sys.excepthook(*sys.exc_info())
            wire.send(answer, {"error": Error(f"{type(error).__name__}: {error}").to_wire()})
    finally:
        os._exit(0)
