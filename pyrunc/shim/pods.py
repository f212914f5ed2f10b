"""The pods of a shim: they share its process, event loop and reaper. Also the socket by which the
server assigns pods to the shim.

Each pod has a socket, shim.json and a lock in its sandbox's folder. A shim without pods waits for
the next pod as long as a server is connected; without a server it ends.
"""

from __future__ import annotations

import fcntl
import os
import time

from pyrunc import atomic_file
from pyrunc.errors import (
    DeadlineExceeded,
    Error,
    InvalidArgument,
    KernelError,
    ResourceExhausted,
)
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.tree import remove_path
from pyrunc.shim import messages, pod, tree
from pyrunc.shim.keeper_link import KeeperLink
from pyrunc.shim.loop import EventLoop
from pyrunc.shim.network import open_network
from pyrunc.shim.reaper import Reaper
from pyrunc.shim.serve import ShimServer, handler
from pyrunc.shim.warn import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.shim.serve import ShimCall
    from pyrunc.shim.starter import Starter

NETWORK_AFTER_S = 0.1
"""How long after `TakePod` the shim makes the next network namespace, so that the pod's processes
start first."""


class ShimPods:
    """The pods of one shim."""

    def __init__(
        self, arguments: messages.Arguments, listener: int, client: int, starter: Starter
    ) -> None:
        """Serve calls on the sockets `listener` and `client`.

        - `listener`: a socket that is bound in the shim's folder
        - `client`: a socket that is connected to the server which started this shim
        - `starter`: starts the pods' processes
        """
        self.starter = starter
        self.loop = EventLoop()
        self.keeper = KeeperLink(self.loop, arguments.keeper)
        self.reaper = Reaper(self.loop, self.keeper)
        self._folder, self._version = arguments.folder, arguments.version
        self._locks: dict[pod.ShimPod, int] = {}
        self._network: int | None = None
        calls = [
            handler(messages.TakePod, self._take_pod),
            handler(messages.GetShim, self._describe),
            handler(messages.EndShim, self._end),
        ]
        self._server = ShimServer(self.loop, listener, calls, lambda client: self._end_if_unused())
        self._server.add_client(client)

    def run(self) -> None:
        """Serve until there is neither a pod nor a server, or until a client ends the shim."""
        write_record(self._folder)
        self._make_network()
        self.loop.run()
        for name in (messages.SOCKET, messages.SHIM_RECORD, messages.LOG):
            remove_path(f"{self._folder}/{name}")

    def remove(self, removed: pod.ShimPod) -> None:
        """Stop serving this pod. Remove its socket and shim.json, unless another shim has replaced
        them."""
        folder = removed.sandbox_dir
        if _is_named_in(folder):
            for name in (messages.SOCKET, messages.SHIM_RECORD):
                remove_path(f"{folder}/{name}")
        lock = self._locks.pop(removed)
        removed.close()
        os.close(lock)
        self._end_if_unused()

    def descriptors(self) -> list[int]:
        """Return the descriptors of all sockets, which a fork must close."""
        return [
            *self._server.descriptors(),
            *(fd for one in self._locks for fd in one.descriptors()),
        ]

    def _take_pod(self, call: ShimCall, request: messages.TakePod) -> None:
        fds = call.take_fds()
        lock = network = -1
        try:
            if len(fds) != 1:
                raise InvalidArgument("take_pod: the request has no listening socket")
            lock = _open_lock(request.sandbox_dir)
            if request.network:
                network = self._take_network()
            if request.deadline_s is not None and time.monotonic() >= request.deadline_s:
                raise DeadlineExceeded(
                    f"take_pod: the deadline for {request.sandbox_dir} has passed"
                )
            write_record(request.sandbox_dir)
            new_pod = pod.ShimPod(
                self, request.sandbox_dir, request.containers_dir, fds[0], network
            )
        except BaseException:
            close_all((*fds, lock, network))
            raise
        self._locks[new_pod] = lock
        call.answer(messages.NetworkNamespace(new_pod.netns_path()))

    def _describe(self, call: ShimCall, request: messages.GetShim) -> None:
        own = _own_record()
        call.answer(messages.ShimInfo(messages.PROTOCOL, self._version, own.pid, own.start_time))

    def _end(self, call: ShimCall, request: messages.EndShim) -> None:
        waiting = [container for served in self._locks for container in served.stop_reading()]
        if waiting:
            for served in self._locks:
                served.read_on()
            raise ResourceExhausted(f"cannot write the logs of {', '.join(waiting)}")
        call.answer()
        self.loop.stop()

    def _take_network(self) -> int:
        """Return a network namespace for one pod: the one that was made in advance, or a new one.
        Raises KernelError."""
        network, self._network = self._network, None
        # A namespace is never handed to a second pod: sysctls, routes and nftables of the first
        # would stay.
        self.loop.after(NETWORK_AFTER_S, self._make_network)
        return open_network() if network is None else network

    def _make_network(self) -> None:
        if self._network is None:
            try:
                self._network = open_network()
            except KernelError as error:  # the next pod's own attempt reports it
                warn(f"cannot prepare a network namespace for the next pod: {error}")

    def _end_if_unused(self) -> None:
        if not self._locks and not self._server.connections:
            self.loop.stop()


def write_record(folder: str) -> None:
    """Write shim.json, which names this process as the one that serves the socket in `folder`."""
    atomic_file.write_json(f"{folder}/{messages.SHIM_RECORD}", _own_record().to_fields())


def _is_named_in(folder: str) -> bool:
    """Return whether shim.json in `folder` names this process."""
    try:
        record = atomic_file.read_json(f"{folder}/{messages.SHIM_RECORD}")
        return messages.ShimRecord.of(record) == _own_record()
    except (Error, OSError):  # the server has removed the folder, for example
        return False


def _own_record() -> messages.ShimRecord:
    # A pid alone may be reused by the time the file is read; with the start time it names one
    # process of this boot.
    own = tree.stat(os.getpid())
    assert own is not None
    return messages.ShimRecord(os.getpid(), own.start_time)


def _open_lock(sandbox_dir: str) -> int:
    """Open the pod's lock file and take a shared flock(2), which this shim and its forks hold. A
    process that gets an exclusive lock on the file knows that the shim and all its forks have
    ended."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    lock = os.open(f"{sandbox_dir}/{messages.LOCK}", flags, 0o600)
    try:
        # Forks share the lock, because it belongs to the open file (flock(2)); a lock of fcntl(2)
        # belongs to the process and would be lost to them.
        fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        os.close(lock)
        raise
    return lock
