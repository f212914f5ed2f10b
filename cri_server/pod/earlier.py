"""Takes pods over from the shims of the version before, which had one shim for each pod and no
keeper (shim protocol 2). This file, its uses and tests/cri/test_earlier_shims.py can be deleted
once no node upgrades from that version any more.

The earlier shim answers `keep` with a copy of what another shim needs: a record, which has the
fields of the keeper's entry, and descriptors. The server stores these in the keeper and ends the
earlier shim; then a shim of this version takes the pod over as from a shim that was killed.

How a container ends whose shim is dead is known from Linux 6.15 on (PIDFD_INFO_EXIT). Before, the
earlier shim is not killed but stopped by SIGSTOP: a parent that is stopped reaps nothing, so the
exit codes of its children stay in /proc. It is killed when all of them have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from cri_server.pod import orphans
from cri_server.pod.client import ShimClient
from cri_server.store.facts import Process, entries
from cri_server.store.model import Sandbox
from cri_server.store.paths import Paths
from pyrunc import ipc
from pyrunc.errors import Unavailable
from pyrunc.keeper.client import PROGRAM, ensure
from pyrunc.kernel.process import stat, wait_status
from pyrunc.records import Record, Request
from pyrunc.shim import messages
from pyrunc.shim.messages import StoredContainer, StoredPause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.records import Id

log = logging.getLogger(__name__)

PROTOCOL = 2
ENDED_S = 0.005  # between two looks whether a killed shim has ended


class Keep(Request):
    """Ask for copies of what another shim needs of a container, or, without one, of the pause
    process."""

    call = "keep"
    container: Id | None = None


class KeptContainer(Record):
    """The answer about a container, with the descriptors of its entry."""

    kept: StoredContainer


class KeptPause(Record):
    """The answer about the pause process, with the descriptors of its entry."""

    kept: StoredPause


class EarlierShims:
    """Ends shims of the earlier version after their pods are in the keeper. Use from one event
    loop."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = asyncio.Lock()
        self._kills: bool | None = None

    async def end(self, sandbox: Sandbox, sandboxes: Iterable[Sandbox]) -> None:
        """Store the pods of the sandbox's earlier shim in the keeper and end the shim. It may serve
        several of `sandboxes`. Raises Error; then the shim goes on."""
        # One shim after the other, so that each pod is without a shim for a few milliseconds only.
        async with self._lock:
            shim = sandbox.shim
            if shim is None or not shim.alive():
                return
            served = [one for one in sandboxes if one.shim == shim]
            running: list[Process] = []
            for one in served:
                running += await self._store(one)
            if self._kills is None:
                self._kills = await asyncio.to_thread(kernel_reports_exits)
            self._end(shim, served, running)
            log.info("shim %d is of an earlier version: its pods move", shim.pid)
            while self._kills and shim.alive():
                await asyncio.sleep(ENDED_S)

    async def _store(self, sandbox: Sandbox) -> list[Process]:
        """Put the entries of the sandbox's processes into the keeper; return the processes."""
        client = await ShimClient.connect(self._paths.sandbox_state(sandbox.id))
        try:
            state = await client.state()
            processes = [Process(c.pid, c.start_time) for c in state.containers if c.running]
            for container in state.containers:
                if container.running:
                    name = StoredContainer.name_of(container.id)
                    await self._store_entry(client, Keep(container.id), name, KeptContainer)
            if state.pause is not None and state.pause.running:
                processes.append(Process(state.pause.pid, state.pause.start_time))
                name = StoredPause.name_of(sandbox.id)
                await self._store_entry(client, Keep(), name, KeptPause)
            return processes
        finally:
            client.close()

    async def _store_entry(
        self, client: ShimClient, request: Keep, name: str, kind: type[KeptContainer | KeptPause]
    ) -> None:
        answer, fds = await client.call(request, kind)
        try:
            data = ipc.encode(answer.kept.to_fields())
            await asyncio.to_thread(self._put, name, data, fds)
        finally:
            ipc.close_all(fds)

    def _put(self, name: str, data: bytes, fds: Sequence[int]) -> None:
        keeper = ensure(self._paths.state)
        try:
            keeper.put(name, data, fds)
        finally:
            keeper.close()

    def _end(self, shim: Process, sandboxes: Iterable[Sandbox], running: Sequence[Process]) -> None:
        """Kill the shim, or stop it for the rest of its children's lives. Raises Unavailable when
        it has reaped one of the processes that were `running`: then it is about to write an exit
        record."""
        pidfd = os.pidfd_open(shim.pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            if not all(map(_is_unreaped, running)):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                raise Unavailable(f"a process of shim {shim.pid} has just ended")
            if self._kills:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)
        self._paths.earlier_shims.mkdir(mode=0o700, exist_ok=True)
        (self._paths.earlier_shims / f"{shim.pid}-{shim.start_time}").touch()
        for sandbox in sandboxes:
            _remove_traces(self._paths.sandbox_state(sandbox.id))
            sandbox.shim = None

    def end_stopped(self) -> None:
        """Kill the stopped shims whose children have all ended."""
        for name in entries(self._paths.earlier_shims):
            shim = Process(*map(int, name.split("-")))
            if shim.alive() and any(map(_runs, _children(shim.pid))):
                continue
            orphans.kill_process(shim)
            (self._paths.earlier_shims / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                self._paths.earlier_shims.rmdir()


def _is_unreaped(process: Process) -> bool:
    """Whether the process runs or is a zombie."""
    status = stat(process.pid)
    return status is not None and status.start_time == process.start_time


def _runs(pid: int) -> bool:
    status = stat(pid)
    return status is not None and status.alive


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def _remove_traces(folder: Path) -> None:
    """Remove the files by which a stopped shim would be taken for the sandbox's shim."""
    for name in (messages.SOCKET, messages.SHIM_RECORD, messages.LOG):
        (folder / name).unlink(missing_ok=True)


def kernel_reports_exits() -> bool:
    """Whether the kernel tells by a pidfd how a process has ended that was reaped. Starts a program
    that ends at once; blocking."""
    pid = os.posix_spawn(PROGRAM, [PROGRAM], {})
    pidfd = os.pidfd_open(pid)
    try:
        status = stat(pid)
        os.waitpid(pid, 0)
        return status is not None and wait_status(pid, status.start_time, pidfd) is not None
    finally:
        os.close(pidfd)
