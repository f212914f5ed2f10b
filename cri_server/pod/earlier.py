"""Takes over pods from shims of the previous version (shim protocol 2). That version had one shim
for each pod and no keeper. This file, its uses and tests/cri/test_earlier_shims.py can be deleted
when no node upgrades from that version any more.

A shim of the previous version answers the call `keep` with all that another shim needs for one
process: the data of an entry in the keeper, and descriptors. The server stores both in the keeper,
and ends the shim. Then a shim of this version takes over the pod, just as after the death of a
shim.

From Linux 6.15 on, a pidfd shows the exit code of a container whose shim is dead
(PIDFD_INFO_EXIT). On older kernels the server does not kill the previous version's shim, but stops
it with SIGSTOP: a stopped parent reaps nothing, so the exit codes of its children stay in /proc.
The server kills the stopped shim when all its children have ended. Until then the shim also has the
writing ends of their stdin pipes, so that no container reads the end of its input.
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
from cri_server.store.facts import ProcessIdentity, entries
from cri_server.store.model import Sandbox
from cri_server.store.paths import Paths
from pyrunc import atomic_file, ipc
from pyrunc.abi.arch import arch
from pyrunc.errors import Error, Unavailable
from pyrunc.keeper.client import PROGRAM, ensure
from pyrunc.kernel.fd import close_all, closing_fd
from pyrunc.kernel.process import stat, wait_status
from pyrunc.records import Record, Request
from pyrunc.shim import messages
from pyrunc.shim.messages import StoredContainer, StoredPause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.records import Id

log = logging.getLogger(__name__)

PROTOCOL = 2
POLL_S = 0.0005  # between two reads of a shim's state
POLLS_LIMIT = 1000  # reads until a shim counts as stopped
STOPPED = "stopped"
"""A file in the folder `earlier_shims` names one shim. This content means that the shim stays
stopped by SIGSTOP."""
STOPS_LIMIT = 500  # attempts to stop a shim while it is idle


class Keep(Request):
    """Asks a shim of the previous version for the data and descriptors with which another shim can
    take over `container`, or the pause process if `container` is None."""

    call = "keep"
    container: Id | None = None


class KeptContainer(Record):
    """A shim's answer to the request `Keep` for a container. The server stores `kept` and the
    answer's descriptors as an entry in the keeper."""

    kept: StoredContainer


class KeptPause(Record):
    """A shim's answer to the request `Keep` for the pause process. The server stores `kept` and the
    answer's descriptors as an entry in the keeper."""

    kept: StoredPause


class EarlierShims:
    """Stores data and descriptors of the previous version's pods in the keeper, then ends the shims
    of these pods, so that other shims can take over. Use from one event loop."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = asyncio.Lock()
        self._kills: bool | None = None
        for name in entries(paths.earlier_shims):
            self._resume_unless_stopped(paths.earlier_shims / name)

    async def end(self, sandbox: Sandbox, sandboxes: Iterable[Sandbox]) -> None:
        """End the sandbox's shim, which is of the previous version. First store data and
        descriptors of the shim's pods in the keeper, so that another shim can take over the pods.

        `sandboxes`: all sandboxes of the server. Does nothing when the shim has ended. After an
        Error the shim keeps running.
        """
        # One shim after the other, so that each pod is without a shim for a few milliseconds only.
        async with self._lock:
            shim = sandbox.shim
            if shim is None or not shim.alive():
                return
            served = [one for one in sandboxes if one.shim == shim]
            running: list[ProcessIdentity] = []
            for one in served:
                running += await self._store(one)
            if self._kills is None:
                self._kills = await asyncio.to_thread(kernel_reports_exits)
            await self._end(shim, running)
            for one in served:
                one.shim = None
            log.info("shim %d has an earlier version: its pods move to another shim", shim.pid)

    async def _store(self, sandbox: Sandbox) -> list[ProcessIdentity]:
        """Store an entry in the keeper for the sandbox's pause process and for each container that
        runs. Return these processes."""
        client = await ShimClient.connect(self._paths.sandbox_state(sandbox.id))
        try:
            state = await client.state()
            processes = [
                ProcessIdentity(c.pid, c.start_time) for c in state.containers if c.running
            ]
            for container in state.containers:
                if container.running:
                    name = StoredContainer.name_of(container.id)
                    await self._store_entry(client, Keep(container.id), name, KeptContainer)
            if state.pause is not None and state.pause.running:
                processes.append(ProcessIdentity(state.pause.pid, state.pause.start_time))
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
            close_all(fds)

    def _put(self, name: str, data: bytes, fds: Sequence[int]) -> None:
        with contextlib.closing(ensure(self._paths.state)) as keeper:
            keeper.put(name, data, fds)

    async def _end(self, shim: ProcessIdentity, running: Sequence[ProcessIdentity]) -> None:
        """Kill the shim. If the kernel does not report exits of reaped processes, only stop the
        shim with SIGSTOP; `end_stopped` kills it when its children have ended. Raises Unavailable
        when the shim has already reaped one of the `running` processes. The shim then continues,
        and writes the exit.json of that process."""
        self._paths.earlier_shims.mkdir(mode=0o700, exist_ok=True)
        file = self._paths.earlier_shims / f"{shim.pid}-{shim.start_time}"
        file.touch()
        try:
            await _stop_idle(shim)
            if not all(map(_is_unreaped, running)):
                raise Unavailable(f"a process of shim {shim.pid} has just ended")
            if not self._kills:
                file.write_text(STOPPED)
                return
            orphans.kill_process(shim)
            while shim.alive():
                await asyncio.sleep(POLL_S)
        finally:
            self._resume_unless_stopped(file)

    def _resume_unless_stopped(self, file: Path) -> None:
        """Send SIGCONT to the shim that `file` names, and remove `file`. But if `file` contains
        STOPPED, leave the shim stopped, and remove its sockets, logs and shim.json files."""
        shim = _process_of(file)
        if file.read_text() == STOPPED:
            self._remove_traces(shim)
        else:
            orphans.send_signal(shim, signal.SIGCONT)
            self._remove(file)

    def _remove_traces(self, shim: ProcessIdentity) -> None:
        """Remove the shim's socket, log and shim.json from the folders of its pods, so that it no
        longer counts as their shim. The shim stays stopped by SIGSTOP."""
        for name in entries(self._paths.sandbox_states):
            folder = self._paths.sandbox_state(name)
            with contextlib.suppress(Error):  # the pod has no shim
                record = atomic_file.read_json(str(folder / messages.SHIM_RECORD))
                if ProcessIdentity.of(record) == shim:
                    for trace in (messages.SOCKET, messages.LOG, messages.SHIM_RECORD):
                        (folder / trace).unlink(missing_ok=True)

    def end_stopped(self) -> None:
        """Kill each shim that `end` has stopped with SIGSTOP, once all its children have ended.
        Also remove the file that names the shim."""
        for name in entries(self._paths.earlier_shims):
            file = self._paths.earlier_shims / name
            shim = _process_of(file)
            if file.read_text() == STOPPED and not (shim.alive() and _has_children(shim)):
                orphans.kill_process(shim)
                self._remove(file)

    def _remove(self, file: Path) -> None:
        file.unlink()
        with contextlib.suppress(OSError):  # the folder is not empty
            self._paths.earlier_shims.rmdir()


def _process_of(file: Path) -> ProcessIdentity:
    return ProcessIdentity(*map(int, file.name.split("-")))


async def _stop_idle(shim: ProcessIdentity) -> None:
    """Send SIGSTOP to the shim while it waits for events: it has then logged all output that it has
    read. If the shim is never idle in `STOPS_LIMIT` attempts, it is stopped all the same."""
    for _ in range(STOPS_LIMIT):
        orphans.send_signal(shim, signal.SIGSTOP)
        for _ in range(POLLS_LIMIT):
            status = stat(shim.pid)
            if status is None or status.state == "T" or not status.alive:
                break
            await asyncio.sleep(POLL_S)
        if _waits_for_events(shim.pid):
            return
        orphans.send_signal(shim, signal.SIGCONT)
        await asyncio.sleep(POLL_S)
    orphans.send_signal(shim, signal.SIGSTOP)
    await asyncio.sleep(POLL_S)


def _waits_for_events(pid: int) -> bool:
    """Return whether the stopped process waits in epoll_wait(2), epoll_pwait(2) or epoll_pwait2(2);
    also True when the process has ended."""
    numbers = arch().syscalls
    waits = {str(numbers.get(name)) for name in ("epoll_wait", "epoll_pwait", "epoll_pwait2")}
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            return file.read().split()[0] in waits
    except OSError:
        return True


def _is_unreaped(process: ProcessIdentity) -> bool:
    """Return whether the process runs or is a zombie."""
    status = stat(process.pid)
    return status is not None and status.start_time == process.start_time


def _has_children(process: ProcessIdentity) -> bool:
    """Return whether the process has a child that is no zombie."""
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
            children = [stat(int(pid)) for pid in file.read().split()]
    except FileNotFoundError:  # it has ended, or the kernel lacks CONFIG_PROC_CHILDREN
        return process.alive()
    return any(child is not None and child.alive for child in children)


def kernel_reports_exits() -> bool:
    """Return whether a pidfd shows the exit code of a process that was reaped already. Tests this
    with a child process that ends at once, and waits for its end."""
    pid = os.posix_spawn(PROGRAM, [PROGRAM], {})
    pidfd = os.pidfd_open(pid)
    with closing_fd(pidfd):
        status = stat(pid)
        os.waitpid(pid, 0)
        return status is not None and wait_status(pid, status.start_time, pidfd) is not None
