"""The pods of one shim, which share its process, loop and reaper: one, or more where memory counts for more than isolation.

Each has its own socket, record and log in its sandbox's folder. The process ends with the last of them; when it is killed, all of
them are lost.
"""

from __future__ import annotations

import fcntl
import os

from pyrunc.errors import InvalidArgument
from pyrunc.shim import messages, pod
from pyrunc.shim.keeper_link import KeeperLink
from pyrunc.shim.loop import Loop
from pyrunc.shim.reaper import Reaper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.shim.serve import Call
    from pyrunc.shim.starter import Starter

_STDERR = 2


class Pods:
    """Those that live. They all start their processes by `starter`. `keeper`: the folder of the keeper, if there is one."""

    def __init__(self, starter: Starter, keeper: str | None = None) -> None:
        self.starter = starter
        self.loop = Loop()
        self.keeper = KeeperLink(self.loop, keeper)
        self.reaper = Reaper(self.loop, self.keeper)
        self._logs: dict[pod.Pod, int] = {}

    def add(
        self, sandbox_dir: str, containers_dir: str, listener: int, network: int | None = None, log: int = -1
    ) -> None:
        """Serve another pod on the socket `listener`, which is ours from now on. `network`: its namespace, made ahead. Raises
        OSError; then the listener is still the caller's."""
        log = open_log(sandbox_dir) if log < 0 else log
        try:
            pod.write_own_record(sandbox_dir)
            self._logs[pod.Pod(self, sandbox_dir, containers_dir, listener, network)] = log
        except BaseException:
            os.close(log)
            raise

    def take(self, call: Call, asked: messages.TakePod) -> None:
        """The call `take_pod`."""
        fds = call.take_fds()
        try:
            if len(fds) != 1:
                raise InvalidArgument("take_pod: there is no listening socket")
            self.add(asked.sandbox_dir, asked.containers_dir, fds[0])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        call.answer(messages.Taken(os.getpid()))

    def left(self, gone: pod.Pod) -> None:
        """A pod is at its end; with the last one the shim is."""
        log = self._logs.pop(gone)
        if self._logs:
            gone.close()
            os.dup2(next(iter(self._logs.values())), _STDERR, inheritable=True)
        else:
            self.loop.stop()
        os.close(log)

    def close(self) -> None:
        """Hang up on everybody, at once; what runs is not ended."""
        for one, log in self._logs.items():
            one.close()
            os.close(log)
        self._logs.clear()
        self.loop.close()

    def descriptors(self) -> list[int]:
        """The sockets of all, which a fork must not keep open."""
        return [fd for one in self._logs for fd in one.descriptors()]


def open_log(sandbox_dir: str) -> int:
    """The shim's log in the sandbox's folder: the server's stderr may be gone tomorrow.

    The lock is the open file's, which our forks have as well: whoever gets it alone knows that all of us have ended.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(f"{sandbox_dir}/{messages.LOG}", flags, 0o600)
    try:
        fcntl.flock(log, fcntl.LOCK_SH)
    except BaseException:
        os.close(log)
        raise
    return log
