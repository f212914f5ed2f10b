"""The server's shims: one connection per living sandbox, what they tell goes into the index, and what is left of a dead one
is ended. A container is never said to run when nobody holds its exit any more.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from cri_server.containers.spec import groups
from cri_server.store.facts import Process
from cri_server.store.index import Index
from cri_server.store.model import Container, Exit, Sandbox
from cri_server.store.paths import Paths
from pyrunc import record
from pyrunc.errors import Error, NotFound, Unavailable
from pyrunc.kernel.process import alive_since
from pyrunc.shim import messages
from pyrunc.shim.client import ShimClient, start_shim
from pyrunc.zygote.client import Zygote

log = logging.getLogger(__name__)

FORKS_TIMEOUT_S, FORKS_INTERVAL_S = 10.0, 0.005
UNKNOWN_REASON, UNKNOWN_CODE = "Unknown", 255  # containerd's, for an exit that nobody saw
PROCESS_RECORD = "state.json"
Told = Callable[[Sandbox, Container | None], None]


class Shims:
    """Starts, finds and hears shims. `told(sandbox, container)` is called after an exit was noted; None: the holder's."""

    def __init__(self, zygote: Zygote, paths: Paths, index: Index) -> None:
        self._zygote, self._paths, self._index = zygote, paths, index
        self._clients: dict[str, ShimClient] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.told: Told = lambda sandbox, container: None

    def get(self, sandbox: Sandbox) -> ShimClient:
        """The connection. Raises Unavailable when its shim is gone."""
        client = self._clients.get(sandbox.id)
        if client is None or client.closed:
            raise Unavailable(f"the shim of sandbox {sandbox.id} is gone")
        return client

    def find(self, sandbox: Sandbox) -> ShimClient | None:
        """The connection, None when there is no shim."""
        client = self._clients.get(sandbox.id)
        return None if client is None or client.closed else client

    async def start(self, sandbox: Sandbox) -> ShimClient:
        """Fork a shim for the sandbox's state folder and connect to it."""
        folder = self._paths.sandbox_state(sandbox.id)
        pid = await start_shim(self._zygote, folder, self._paths.container_states)
        started = alive_since(pid)
        sandbox.shim = Process(pid, started) if started is not None else None
        return await self.connect(sandbox)

    async def connect(self, sandbox: Sandbox) -> ShimClient:
        """Connect to the shim that lives already. Raises NotFound, Unavailable."""
        client = await ShimClient.connect(
            self._paths.sandbox_state(sandbox.id),
            on_event=lambda event: self._event(sandbox, event),
            on_close=lambda: self._closed(sandbox),
        )
        self._clients[sandbox.id] = client
        sandbox.reachable = True
        return client

    async def shutdown(self, sandbox: Sandbox) -> None:
        """End the sandbox's shim; fine when it is gone. Raises WrongState while something runs in it."""
        client = self.find(sandbox)
        if client is not None:
            await client.shutdown()
        await self.settle(sandbox)
        self._clients.pop(sandbox.id, None)
        sandbox.reachable = False

    def drop(self, sandbox: Sandbox) -> None:
        """Give up on a shim that does not answer."""
        client = self._clients.pop(sandbox.id, None)
        if client is not None:
            client.close()
        sandbox.reachable = False

    def disconnect(self) -> None:
        """Hang up everywhere; the shims stay."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    async def settle(self, sandbox: Sandbox | None = None) -> None:
        """Wait for what is being done about a lost shim, this sandbox's or any."""
        tasks = [task for name, task in self._ending.items() if sandbox is None or name == sandbox.id]
        if tasks:
            await asyncio.wait(tasks)

    def _event(self, sandbox: Sandbox, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "holder_exit":
            sandbox.holder_alive = False
            self.told(sandbox, None)
        elif kind == "exit":
            container = self._index.containers.find(str(event.get("container")))
            if container is not None and container.exit is None:
                container.ended(Exit.from_record(event))
                self.told(sandbox, container)

    def _closed(self, sandbox: Sandbox) -> None:
        self._clients.pop(sandbox.id, None)
        sandbox.reachable = False
        log.warning("sandbox %s: its shim is gone", sandbox.id)
        task = asyncio.get_running_loop().create_task(self.end_orphans(sandbox))
        self._ending[sandbox.id] = task
        task.add_done_callback(lambda task: self._ending.pop(sandbox.id, None))

    async def end_orphans(self, sandbox: Sandbox) -> None:
        """The sandbox's shim is gone: take what it left on disk, end the holder and the containers that still run.

        Nobody reads their output or can tell their exit codes any more, so they end with reason Unknown.
        """
        if sandbox.shim is not None:
            kill_process(sandbox.shim)
        await self.wait_for_forks(sandbox.id)
        for container in self._index.containers_of(sandbox):
            await self._end_orphan(sandbox, container)
        if sandbox.holder is not None:
            kill_process(sandbox.holder)
        await self.kill_group(sandbox.cgroups_path, sandbox.id)
        sandbox.holder_alive = False
        self.told(sandbox, None)

    async def _end_orphan(self, sandbox: Sandbox, container: Container) -> None:
        if container.exit is not None:  # its group may be left: of a start that failed, or not removed yet
            await self.kill_group(container.cgroups_path, container.id)
            return
        self.read_facts(container)
        if container.exit is None and (container.process or self.group_exists(container)):
            await self._end(container)
        else:
            await self.kill_group(container.cgroups_path, container.id)
        if container.exit is not None:
            self.told(sandbox, container)

    async def wait_for_forks(self, sandbox_id: str) -> None:
        """Until the sandbox's shim and all its forks have ended, which share the lock of its log.

        They die with it, but later: one that is making a cgroup would make it after we have looked for it.
        """
        try:
            log_file = os.open(
                self._paths.sandbox_state(sandbox_id) / messages.LOG, os.O_RDONLY | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return
        try:
            deadline = time.monotonic() + FORKS_TIMEOUT_S
            while not _locked(log_file):
                if time.monotonic() > deadline:
                    log.error("sandbox %s: forks of its dead shim do not end", sandbox_id)
                    return
                await asyncio.sleep(FORKS_INTERVAL_S)
        finally:
            os.close(log_file)

    def read_facts(self, container: Container) -> None:
        """What was written about the container: its process by us, its exit by the shim."""
        folder = self._paths.container_state(container.id)
        try:
            container.ended(Exit.from_record(record.read_json(str(folder / messages.EXIT_RECORD))))
        except NotFound:
            pass
        except Error as error:
            log.error("container %s: %s", container.id, error)
            container.ended(Exit(UNKNOWN_CODE, time.time_ns(), reason=UNKNOWN_REASON, message=error.message))
        try:
            state = record.read_json(str(folder / PROCESS_RECORD))
        except Error:
            return
        container.process = Process.parse(state)
        container.started_at_ns = container.started_at_ns or int(state.get("started_at_ns", 0))

    async def _end(self, container: Container) -> None:
        if container.process is not None:
            kill_process(container.process)
        await self.kill_group(container.cgroups_path, container.id)
        message = "the container's shim was lost, and with it the exit code; the container was killed"
        ended = Exit(UNKNOWN_CODE, time.time_ns(), reason=UNKNOWN_REASON, message=message)
        content = {
            "exit_code": ended.exit_code,
            "signal": None,
            "finished_at_ns": ended.finished_at_ns,
            "oom_killed": False,
            "reason": ended.reason,
            "message": ended.message,
        }
        path = self._paths.container_state(container.id) / messages.EXIT_RECORD
        try:
            record.write_json(str(path), content)
        except OSError as error:
            log.error("container %s: cannot write %s: %s", container.id, path, error)
        container.ended(ended)

    def group_exists(self, container: Container) -> bool:
        """Whether the container has a cgroup: it is made at the start and removed after the exit."""
        group = groups.place(container.cgroups_path, container.id)
        return group.exists()

    async def kill_group(self, cgroups_path: str, identifier: str) -> None:
        """SIGKILL to all of a cgroup and remove it; what fails is logged."""
        if not cgroups_path:
            return
        try:
            group = groups.place(cgroups_path, identifier)
            await asyncio.to_thread(_kill_and_remove, group)
        except (Error, OSError) as error:
            log.warning("cgroup %s: %s", cgroups_path, error)


def _kill_and_remove(group: Any) -> None:
    if group.exists():
        group.kill()
        group.remove()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def kill_process(process: Process) -> None:
    """SIGKILL to this very process: through a pidfd that is checked against the start time, never by number alone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.alive():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
