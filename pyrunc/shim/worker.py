"""Starting a container is the work of a fork of the shim, which ends when the container runs.

Two reasons. A start dirties some two megabytes of an interpreter's heap, which would stay with the shim for the pod's life.
And it may take long: hooks, a slow disk, while the pod's other containers want their output read. The container is the
fork's child first and becomes ours, a subreaper's, when the fork ends.

A parked worker was forked before there was work, and has touched the memory that a start touches: two milliseconds of page
faults (each copies a page) that nobody waits for. It does one piece of work like the others, then it ends.
"""

from __future__ import annotations

import os
import signal
import sys
from _socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair

from pyrunc import ipc
from pyrunc.errors import Error, KernelError, Unavailable, from_wire
from pyrunc.kernel.reaper import set_name, set_parent_death_signal
from pyrunc.shim import rehearse
from pyrunc.shim.loop import READABLE
from pyrunc.zygote import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from pyrunc.shim.loop import Loop
    from pyrunc.shim.reaper import Reaper

    Result = tuple[dict[str, Any], list[int]]


class WorkerLost(Unavailable):
    """A worker ended without an answer; what it had made so far may be left."""


class Parked:
    """A fork that waits for its work."""

    def __init__(
        self, perform: Callable[[dict[str, Any], list[int]], Result], not_inherited: Sequence[int] = ()
    ) -> None:
        """`perform(job, fds)` is what it will do with the job that it is given."""
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self.socket, shim = ours, os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _work(shim, lambda: _wait(perform, theirs), theirs, not_inherited)
        theirs.close()

    def give(self, job: dict[str, Any], fds: Sequence[int]) -> bool:
        """Let it begin; its answer comes on `socket`, which is the caller's now. False when it has died."""
        try:
            ipc.send(self.socket, job, [2, *fds])  # our own log is its
        except (BrokenPipeError, ConnectionResetError):
            self.socket.close()
            return False
        return True

    def close(self) -> None:
        """It is not needed: it ends."""
        self.socket.close()


def _wait(perform: Callable[[dict[str, Any], list[int]], Result], requests: socket) -> Result:
    set_name("pyrunc-spare")
    rehearse.warm_up()
    received = ipc.receive(requests)
    if received is None:
        os._exit(0)
    job, fds = received
    os.dup2(fds[0], 2)
    set_name("pyrunc-shim")
    return perform(job, fds[1:])


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
        parked: Parked | None = None,
    ) -> None:
        """`parked` has been given the work already."""
        self._loop, self._reaper = loop, reaper
        self._on_done, self._on_failed = on_done, on_failed
        if parked:
            self._answer, self.pid = parked.socket, parked.pid
        else:
            self._answer, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
            shim = os.getpid()
            self.pid = os.fork()
            if self.pid == 0:
                _work(shim, work, theirs, not_inherited)
            theirs.close()
        reaper.hold()  # what the fork leaves us may end before we hear its pid
        loop.watch(self._answer.fileno(), READABLE, self._answered)

    def kill(self) -> None:
        """Give up, with the launcher and the hooks that it started; `on_failed` will hear of it."""
        descendants.kill(self.pid)

    def _answered(self, events: int) -> None:
        try:
            received = ipc.receive(self._answer)
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
                ipc.close_all(fds)
                self._on_failed(from_wire(message["error"]))
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
    """With the shim dead nobody would hold what is started: then this ends too."""
    try:
        set_parent_death_signal(signal.SIGKILL, shim)
        ipc.close_all(not_inherited)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            fields, fds = work()
            ipc.send(answer, {"ok": fields}, fds)
        except Error as error:
            ipc.send(answer, {"error": error.to_wire()})
        except OSError as error:
            failed = KernelError("start", error.filename or "", error.errno or 0, error.strerror or "")
            ipc.send(answer, {"error": failed.to_wire()})
        except Exception as error:
            sys.excepthook(*sys.exc_info())
            ipc.send(answer, {"error": Error(f"{type(error).__name__}: {error}").to_wire()})
    finally:
        os._exit(0)
