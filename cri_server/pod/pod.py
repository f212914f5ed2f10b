"""Class `Pod`, through which the CRI verbs operate on a sandbox and its containers. The pod's shim
carries the operations out.

A shim may be killed, replaced or stop answering at any time (`cri_server.pod.shims`). Methods that
start or change something then raise Unavailable. Methods that end something work without a shim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence

from cri_server.observability.timeline.trace import add_remote_spans, span
from cri_server.operations.tasks import shield_until_done
from cri_server.pod import orphans
from cri_server.pod.client import ExecSession, SessionStreams
from cri_server.pod.processes import ANSWER_S
from cri_server.pod.shims import Shims
from cri_server.spec import groups
from cri_server.store.facts import ProcessIdentity
from cri_server.store.model import Container, Sandbox
from pyrunc.errors import DeadlineExceeded, Error, NotFound, PeerError, Unavailable, WrongState
from pyrunc.shim import messages

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 60.0
SHIM_TIMEOUT_S = 20.0
"""How long, beyond the grace period, a shim may take to confirm that a process has ended. Longer
than `UNKILLABLE_AFTER_S` (pyrunc/shim/stop.py): after that time the shim reports that SIGKILL had
no effect."""
SHIMS_LIMIT = 5  # stopping a container fails after the loss of so many shims


class Pod:
    """Controls one sandbox through its shim. The object is stateless."""

    def __init__(self, shims: Shims, sandbox: Sandbox) -> None:
        self._shims, self._sandbox = shims, sandbox

    # -- the shim

    @property
    def has_shim(self) -> bool:
        """Return whether a shim serves the pod and answers."""
        return self._shims.find(self._sandbox) is not None

    @property
    def is_silent(self) -> bool:
        """Return whether the pod's shim lives, but does not answer."""
        return self._shims.is_silent(self._sandbox)

    def require_shim(self) -> None:
        """Raise Unavailable unless the pod has a shim that answers."""
        self._shims.get(self._sandbox)

    async def assign_shim(self, *, network: bool) -> str | None:
        """Have a shim serve the pod; fork a shim if none lives. With `network`, return the path of
        the pod's new network namespace. Raises Unavailable when the shim does not answer, and the
        errors of the fork."""
        return await shield_until_done(self._shims.start(self._sandbox, network=network))

    async def reach(self) -> bool:
        """Connect to the pod's shim; if the shim is dead, have another shim take over the pod.
        Return whether a shim answers."""
        return await self._shims.reach(self._sandbox)

    async def wait_taken_over(self) -> None:
        """If another shim is just taking over the pod, wait until it has done so or failed."""
        await self._shims.drain(self._sandbox)

    async def release_shim(self) -> None:
        """Have the shim stop serving the pod. Raises WrongState while a process of the pod runs."""
        await self._shims.shutdown(self._sandbox)

    async def end(self) -> None:
        """Have the shim kill the containers that still run, and stop serving the pod. If the shim
        does not answer, kill it and all processes of the pod."""
        try:
            async with asyncio.timeout(SHIM_TIMEOUT_S):
                try:
                    await self.release_shim()
                except WrongState:
                    await self._kill_containers()
                    await self.release_shim()
        except PeerError as error:
            log.warning("sandbox %s: %s", self._sandbox.id, error)
        except TimeoutError:
            await self._shims.kill_pod(self._sandbox)
        if self.is_silent:
            await self._shims.kill_pod(self._sandbox)

    async def _kill_containers(self) -> None:
        """Have the shim kill all containers that have not ended. The server may not know that they
        run: it may have been killed before the shim answered StartContainer."""
        client = self._shims.get(self._sandbox)
        for container in (await client.state()).containers:
            if container.exit is None:
                log.warning("container %s still runs in the shim and is killed", container.id)
                await client.stop(container.id, signal.SIGKILL, 0.0)

    async def _abandon(self, what: str, waited_s: float) -> None:
        """Log that the shim did not answer a call about the sandbox or container `what` for
        `waited_s` seconds, then kill the shim and all processes of the pod."""
        log.error("%s: its shim did not answer for %g s and is killed", what, waited_s)
        await self._shims.kill_pod(self._sandbox)

    # -- the pause process

    async def start_pause(self) -> str | None:
        """Start the pause process that pause.json describes; return the path of the pod's network
        namespace. Raises Unavailable when no shim answers, another Error when the start fails."""
        started = await self._shims.get(self._sandbox).start_pause()
        add_remote_spans(started.parts)
        self._sandbox.pause = ProcessIdentity(started.pid, started.start_time)
        self._sandbox.pause_alive = True
        return started.netns_path

    async def stop_pause(self, boot_id: str) -> None:
        """End the pause process. Without a shim the server kills the process by its pid, but only
        if the process was started in the current boot, whose id is `boot_id`."""
        sandbox, client = self._sandbox, self._shims.find(self._sandbox)
        try:
            if client is not None:
                async with asyncio.timeout(SHIM_TIMEOUT_S):
                    await client.stop_pause()
        except PeerError as error:
            log.warning("sandbox %s: %s", sandbox.id, error)
        except TimeoutError:
            await self._abandon(f"sandbox {sandbox.id}", SHIM_TIMEOUT_S)
        # A start time counts from the boot (proc_pid_stat(5)), so after a reboot pid and start time
        # may name another process.
        if sandbox.pause is not None and sandbox.boot_id == boot_id:
            orphans.kill_process(sandbox.pause)
        sandbox.pause_alive = False

    async def undo_start_pause(self) -> None:
        """End the pause process of a pod whose creation has failed, and remove its cgroup."""
        client = self._shims.find(self._sandbox)
        if client is not None:
            await client.stop_pause()
        await orphans.kill_group(self._sandbox.cgroups_path, self._sandbox.id)
        self._sandbox.pause_alive = False

    # -- containers

    async def create(
        self, container: Container, request: messages.CreateContainer, fds: Sequence[int]
    ) -> None:
        """Have the shim compile the container and create its cgroup. `fds`: the mounts of the
        images in `request.images`, then the mount sources in `request.opened`; the caller closes
        them.

        Raises Unavailable when no shim answers, or the error of the compilation. When the shim does
        not reply in time, kills the shim, so that another shim takes over its pods, and raises
        DeadlineExceeded.
        """
        shim, client = self._sandbox.shim, self._shims.get(self._sandbox)
        with span("compile"):
            try:
                async with asyncio.timeout(COMPILE_TIMEOUT_S):
                    add_remote_spans((await client.create_container(request, fds)).parts)
            except TimeoutError:
                if shim is not None:
                    orphans.kill_process(shim)
                raise DeadlineExceeded(
                    f"container {container.id}: the shim did not prepare it within"
                    f" {COMPILE_TIMEOUT_S:g} s"
                ) from None
        container.created_in = shim
        container.has_cgroup = groups.place(container.cgroups_path, container.id).exists()

    def is_created(self, container: Container) -> bool:
        """Return whether the container can be started: its shim still has the compiled container,
        and the cgroup that the shim made for it still exists."""
        if container.created_in is None or container.created_in != self._sandbox.shim:
            return False
        # An external runtime makes the cgroup at the start, and so does CRIU.
        if not container.has_cgroup:
            return True
        return groups.place(container.cgroups_path, container.id).exists()

    async def drop(self, container: Container) -> None:
        """Discard a created container that was not started: its shim forgets the compiled launch,
        and its cgroup is removed. Does nothing once the container has been started."""
        if container.process is not None:
            return
        container.created_in = None
        client = self._shims.find(self._sandbox)
        if client is not None:
            # Errors: the shim was killed meanwhile, or does not answer.
            with contextlib.suppress(Error, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await client.drop_container(container.id)
        await orphans.kill_group(container.cgroups_path, container.id)

    async def start(self, container: Container) -> None:
        """Start a created container. Raises Unavailable when no shim answers. Raises another Error
        when the shim refuses the start, or when the start fails; after a failed start the shim has
        written the container's exit.json."""
        container.created_in = None
        client = self._shims.get(self._sandbox)
        container.start_sent = True
        started = await client.start_container(container.id)
        add_remote_spans(started.parts)
        container.process = ProcessIdentity(started.pid, started.start_time)
        container.started_at_ns = started.started_at_ns

    async def stop(self, container: Container, signal: int, timeout_s: float) -> None:
        """Send `signal` to the container, and SIGKILL after `timeout_s`; return when the container
        has ended.

        If the shim dies meanwhile, the shim that takes over continues the stop. If no shim takes
        over, the server kills all processes of the pod. Raises DeadlineExceeded when SIGKILL does
        not end the container, Unavailable after the loss of `SHIMS_LIMIT` shims.
        """
        for _ in range(SHIMS_LIMIT):
            if not await self.reach():
                await self._shims.kill_pod(self._sandbox)
                return
            if container.exit is not None:  # reported by the shim meanwhile
                return
            # The shim was killed meanwhile: another one has taken over its containers, or they have
            # ended.
            with contextlib.suppress(PeerError):
                await self._stop(container, signal, timeout_s)
                return
        raise Unavailable(
            f"container {container.id}: {SHIMS_LIMIT} shims were lost while it was being stopped"
        )

    async def _stop(self, container: Container, signal: int, timeout_s: float) -> None:
        """Have the shim stop the container. Raises PeerError when the connection to the shim is
        lost."""
        client = self._shims.get(self._sandbox)
        patience_s = max(timeout_s, 0.0) + SHIM_TIMEOUT_S
        try:
            async with asyncio.timeout(patience_s):
                container.set_exit(await client.stop(container.id, signal, max(timeout_s, 0.0)))
        except TimeoutError:
            await self._abandon(f"container {container.id}", patience_s)
        except NotFound:
            if container.exit is None:
                raise

    async def kill(self, container: Container, signal: int) -> None:
        """Have the shim send `signal` and SIGKILL to the container at once, even while it is being
        started; return after its end. Does nothing if no shim answers. Raises Unavailable when the
        shim is lost meanwhile, or the shim's error, such as DeadlineExceeded when SIGKILL does not
        end the container."""
        client = self._shims.find(self._sandbox)
        if client is not None:
            await client.stop(container.id, signal, 0.0)

    async def remove(self, container: Container) -> None:
        """Have the shim forget a container that has ended, or was never started."""
        await self.drop(container)
        client = self._shims.find(self._sandbox)
        try:
            if client is not None:
                async with asyncio.timeout(SHIM_TIMEOUT_S):
                    await client.forget(container.id)
        except (PeerError, TimeoutError) as error:
            log.warning(
                "container %s: its shim did not confirm the removal, which continues: %r",
                container.id,
                error,
            )

    async def reopen_log(self, container: Container) -> None:
        """Have the shim continue the container's log in a new file at the log's path; return when
        the file exists. Raises Unavailable when no shim answers, or the shim's error."""
        await self._shims.get(self._sandbox).reopen_log(container.id)

    async def attach(
        self, container: Container, *, stdin: bool, stdout: bool, stderr: bool
    ) -> SessionStreams:
        """Attach to a running container: return pipes to its stdin and from its stdout and stderr,
        as requested. Output from before the call is not repeated. Raises Unavailable when no shim
        answers, or the shim's error."""
        client = self._shims.get(self._sandbox)
        return await client.attach(container.id, stdin=stdin, stdout=stdout, stderr=stderr)

    async def resize(self, container: Container, width: int, height: int) -> None:
        """Set the size of the container's terminal, in characters. Does nothing unless the
        container runs with a terminal. Raises Unavailable when no shim answers, or the shim's
        error."""
        if container.running and container.config.tty:
            client = self._shims.get(self._sandbox)
            await client.resize(width, height, container=container.id)

    # -- exec sessions

    async def exec(self, request: messages.StartExec) -> ExecSession:
        """Run a command in a container of the pod and return its session. Raises Unavailable when
        no shim answers, or the shim's error."""
        with span("execute"):
            session = await self._shims.get(self._sandbox).exec(request)
            add_remote_spans(session.parts)
        return session

    async def kill_exec(self, exec_id: str) -> None:
        """Kill the command of an exec session with its descendants. Does nothing if the session or
        the shim is gone."""
        client = self._shims.find(self._sandbox)
        try:
            if client is not None:
                await client.kill_exec(exec_id)
        except PeerError:
            pass
        except Error as error:
            log.debug("cannot kill exec session %s: %s", exec_id, error)

    async def resize_exec(self, session: ExecSession, width: int, height: int) -> None:
        """Set the size of the exec session's terminal, in characters. Does nothing after the
        command's exit. Raises Unavailable when no shim answers, or the shim's error."""
        if not session.exited.done():
            client = self._shims.get(self._sandbox)
            await client.resize(width, height, exec_id=session.exec_id)
