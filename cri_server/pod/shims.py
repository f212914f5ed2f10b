"""Connects each living sandbox to its shim, and updates the server's index when a shim reports an
exit.

When a shim dies, another shim takes over those processes of its pods whose descriptors the keeper
has stored. The server kills all other processes of these pods, because it could not observe their
exits and must not report them as running.

When a shim lives but does not answer (stopped, starved, waiting for a disk), the server waits for
it. Meanwhile it derives the pod's state from the processes: a container is running while its first
process lives, and its state is unknown afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from cri_server.network.names import path_after_take_over
from cri_server.operations.tasks import shield_until_done
from cri_server.pod import orphans
from cri_server.pod.client import ExecSession, ShimClient
from cri_server.pod.earlier import PROTOCOL as EARLIER_PROTOCOL
from cri_server.pod.earlier import EarlierShims
from cri_server.pod.keeper import StoredPods
from cri_server.pod.processes import ANSWER_S, ShimProcesses
from cri_server.pod.stdin import StdinPipes
from cri_server.store.facts import ProcessIdentity
from cri_server.store.index import StoreIndex
from cri_server.store.model import Container, Exit, Sandbox
from cri_server.store.paths import Paths
from pyrunc.errors import AlreadyExists, Error, NotFound, Unavailable
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import alive_since
from pyrunc.shim import messages

log = logging.getLogger(__name__)

SILENT_POLL_S = 1.0  # between two reads of the state of a silent shim's pod
KILLED_POLL_S = 0.01  # between two checks whether a killed shim has ended
RECONNECT_S = 0.1  # before the server connects again after a loss
TAKE_OVER_AFTER_S = (0.0, 0.2, 1.0, 3.0)  # the zygote may have been killed too, and be replaced
# how long a caller waits while another shim takes over; giving up ends the whole pod
TAKE_OVER_S = 30.0
OnExit = Callable[[Sandbox, Container | None], None]
OnMoved = Callable[[Sandbox], Awaitable[None]]


class Shims:
    """The connections of all pods to their shims.

    - `on_exit(sandbox, container)`: called after an exit was entered into the server's index;
      `container` is None for the pause process.
    - `on_moved(sandbox)`: called after another shim has taken over the pod.
    """

    def __init__(self, processes: ShimProcesses, paths: Paths, index: StoreIndex) -> None:
        self.processes, self._paths, self._index = processes, paths, index
        self._clients: dict[str, ShimClient] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._reconnecting: dict[str, asyncio.Task[bool]] = {}
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._taking_over: set[str] = set()
        self._pods: dict[str, Sandbox] = {}
        self._lost_sessions: dict[str, list[ExecSession]] = {}
        self._timed = False
        self.stored = StoredPods(paths.state)
        self._earlier = EarlierShims(paths)
        self._stdins = StdinPipes()
        self.on_exit: OnExit = lambda sandbox, container: None
        self.on_moved: OnMoved = _ignore_move

    def time_operations(self, timed: bool) -> None:
        """Set whether shims report the time of each operation of a launch (`ShimClient.timed`)."""
        self._timed = timed
        for client in self._clients.values():
            client.timed = timed

    def get(self, sandbox: Sandbox) -> ShimClient:
        """Return the connection to the sandbox's shim. Raises Unavailable when the shim is gone or
        does not answer."""
        client = self.find(sandbox)
        if client is None:
            what = "does not answer" if self.is_silent(sandbox) else "has ended"
            raise Unavailable(f"the shim of sandbox {sandbox.id} {what}")
        return client

    def find(self, sandbox: Sandbox) -> ShimClient | None:
        """Return the connection to the sandbox's shim. Return None if there is no shim, if it does
        not answer, or if it has not yet taken over the whole pod."""
        return None if sandbox.id in self._taking_over else self._connection(sandbox)

    def _connection(self, sandbox: Sandbox) -> ShimClient | None:
        client = self._clients.get(sandbox.id)
        return None if client is None or client.closed else client

    def is_silent(self, sandbox: Sandbox) -> bool:
        """Return whether the pod's shim lives but does not answer."""
        return sandbox.id in self._answers

    def count(self) -> dict[str, int]:
        """Return the number of pods whose shim is connected, and of pods whose shim lives but does
        not answer."""
        return {"connected": len(self._clients), "silent": len(self._answers)}

    async def start(self, sandbox: Sandbox, *, network: bool = False) -> str | None:
        """Have a shim serve the sandbox, and connect to this shim. With `network`, return the path
        of the pod's new network namespace. Raises Unavailable when the shim does not answer."""
        folder, containers = self._paths.sandbox_state(sandbox.id), self._paths.container_states
        pods = Counter(one.shim for one in self._pods.values() if one.shim is not None)
        self._pods[sandbox.id] = sandbox
        sandbox.shim, path = await self.processes.take_pod(
            folder, containers, pods, network=network
        )
        self._use(sandbox, await self._open(sandbox))
        return path

    async def _open(self, sandbox: Sandbox) -> ShimClient:
        """Connect to the shim of the sandbox. Raises NotFound when the shim is dead, Unavailable
        when it accepts no connection."""
        return await ShimClient.connect(
            self._paths.sandbox_state(sandbox.id),
            on_event=lambda event: self._event(sandbox, event),
        )

    def _use(self, sandbox: Sandbox, client: ShimClient) -> None:
        """Register `client` as the sandbox's connection. When the connection ends, `_closed` is
        called."""
        client.on_close = lambda: self._closed(sandbox, client)
        client.timed = self._timed
        self._clients[sandbox.id], self._pods[sandbox.id] = client, sandbox
        sandbox.reachable = True

    async def reach(self, sandbox: Sandbox) -> bool:
        """Connect to the sandbox's shim and read the pod's state from the shim. Abort starts of
        containers that were in progress when an earlier connection was lost. Return whether the
        server now has a connection to a shim that serves the pod.

        Waits up to `ANSWER_S` for the shim's answer, and longer while another shim takes over.

        If the shim is dead, another shim takes over the pod. Where that is impossible, for example
        because the keeper has no descriptors of the pod, the server ends the pod's processes.

        If the shim lives but does not answer (`is_silent`), the server continues to wait for the
        answer in the background.
        """
        if self.find(sandbox) is not None:
            return True
        task = self._answers.get(sandbox.id)
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self._await_answer(sandbox))
            self._answers[sandbox.id] = task
            task.add_done_callback(lambda done: self._answered(sandbox, done))
        await asyncio.wait([task], timeout=ANSWER_S)
        if sandbox.id in self._taking_over:
            await asyncio.wait([task], timeout=TAKE_OVER_S)
        if self.is_silent(sandbox):
            log.warning("sandbox %s: the process of its shim runs, but does not answer", sandbox.id)
            self._derive_states(sandbox)
        else:
            await asyncio.wait([task])  # its processes are being ended
        return self.find(sandbox) is not None

    def _answered(self, sandbox: Sandbox, task: asyncio.Task[None]) -> None:
        if self._answers.get(sandbox.id) is task:
            del self._answers[sandbox.id]
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "sandbox %s: unexpected error while connecting to its shim: %s",
                sandbox.id,
                task.exception(),
                exc_info=task.exception(),
            )

    async def _await_answer(self, sandbox: Sandbox) -> None:
        """Request the shim's state until the shim answers or is dead; connect again after each
        refused or lost connection."""
        while True:
            try:
                client = await self._open(sandbox)
            except NotFound:  # it does not live
                try:
                    taken_over = await self._take_over(sandbox)
                except OSError as error:
                    await self._wait_for_descriptors(sandbox, error)
                    continue
                if not taken_over:
                    self._answers.pop(sandbox.id, None)
                    await self._end_once(sandbox)
                return
            except OSError as error:
                await self._wait_for_descriptors(sandbox, error)
                continue
            except Error:  # it accepts no connection at the moment
                self._derive_states(sandbox)
                await asyncio.sleep(SILENT_POLL_S)
                continue
            try:
                state = await self._ask_state(sandbox, client)
            except Error as error:
                log.info("sandbox %s: cannot read the state of its shim: %s", sandbox.id, error)
                client.close()
                await asyncio.sleep(RECONNECT_S)
                continue
            except BaseException:
                client.close()
                raise
            if state.protocol == EARLIER_PROTOCOL:
                client.close()
                await self._end_earlier(sandbox, state)
                continue
            state = await self._take_over_rest(sandbox, client, state)
            state = await self._end_interrupted_starts(sandbox, client, state)
            if client.closed:  # the shim has died meanwhile
                await asyncio.sleep(RECONNECT_S)
                continue
            # Before `_use`: a caller that finds the connection must find the shim's states, too.
            self._apply_state(sandbox, state)
            self._use(sandbox, client)
            self._lost_sessions.pop(sandbox.id, None)  # it has ended them
            await self._finish_take_over(sandbox, state)
            return

    async def _wait_for_descriptors(self, sandbox: Sandbox, error: OSError) -> None:
        """Wait before the next attempt to reach the shim. Called after a system call has failed,
        for example because this process has too many open descriptors."""
        log.warning("sandbox %s: cannot reach its shim, trying again: %s", sandbox.id, error)
        await asyncio.sleep(SILENT_POLL_S)

    async def _end_earlier(self, sandbox: Sandbox, state: messages.PodState) -> None:
        """End a shim of the previous server version, so that the caller can move the pod to another
        shim. A failure is logged; the shim then continues, and the caller tries again."""
        self._apply_state(sandbox, state)
        self._taking_over.add(sandbox.id)
        delay_s = 0.0
        try:
            with sandbox.gate:
                await self.processes.ready()
                self._save_stdins(sandbox.shim)
                await self._earlier.end(sandbox, self._index.sandboxes)
        except (Error, OSError) as error:
            log.warning(
                "sandbox %s: cannot replace its shim of an earlier version, trying again: %s",
                sandbox.id,
                error,
            )
            delay_s = SILENT_POLL_S
        finally:
            self._taking_over.discard(sandbox.id)
        await asyncio.sleep(delay_s)
        for container in self._index.containers_of(sandbox):
            orphans.read_records(self._paths, container)

    def _save_stdins(self, shim: ProcessIdentity | None) -> None:
        """Copy the writing ends of the stdin pipes of the shim's containers, before the server
        ends `shim`. Does nothing for None."""
        if shim is not None:
            for sandbox in self._index.sandboxes:
                if sandbox.shim == shim:
                    self._stdins.take(shim, self._index.containers_of(sandbox))

    async def _take_over(self, sandbox: Sandbox) -> bool:
        """Have another shim take over a pod whose shim is dead, if the keeper stores descriptors of
        the pod's processes. Return whether another shim has taken over."""
        if sandbox.phase != "ready":
            return False
        stored = await self.stored.ids()
        living = [c for c in self._index.containers_of(sandbox) if c.exit is None]
        if stored.isdisjoint((sandbox.id, *(c.id for c in living))):
            return False
        sessions = self._lost_sessions.pop(sandbox.id, [])
        with sandbox.gate:
            self._taking_over.add(sandbox.id)
            try:
                return await self._try_take_over(sandbox, living, sessions)
            except asyncio.CancelledError:
                # The caller has given up: end what was begun.
                self.drop(sandbox)
                self._kill_shim(sandbox)
                raise
            finally:
                self._taking_over.discard(sandbox.id)

    async def _try_take_over(
        self, sandbox: Sandbox, living: Sequence[Container], sessions: Sequence[ExecSession]
    ) -> bool:
        for delay_s in TAKE_OVER_AFTER_S:
            await asyncio.sleep(delay_s)
            # A shim that has failed to take over a process serves other pods, so it is tried again.
            if self._connection(sandbox) is None:
                await self._end_rest_of_shim(sandbox)
            try:
                await self._take_over_pod(sandbox, living, sessions)
            except (Error, OSError) as error:
                log.error(
                    "sandbox %s: another shim failed to take over (up to %d attempts): %s",
                    sandbox.id,
                    len(TAKE_OVER_AFTER_S),
                    error,
                )
            else:
                log.warning("sandbox %s: another shim has taken over", sandbox.id)
                return True
        client = self._connection(sandbox)
        if client is not None:
            await self._end_partial_take_over(sandbox, client)
        self.drop(sandbox)
        return False

    async def _end_partial_take_over(self, sandbox: Sandbox, client: ShimClient) -> None:
        """Have a shim end those processes of the pod that it has taken over, and stop serving the
        pod. The shim itself continues, because it serves other pods. If one of these steps fails,
        or they take longer than `ANSWER_S`, `end_orphans` will kill the shim."""
        # First, as in `end_orphans`: a client that sees an ended container must see this, too.
        sandbox.pause_alive = False
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await client.state()
                running = [one.id for one in state.containers if one.exit is None]
                await asyncio.gather(*(client.stop(one, signal.SIGKILL, 0.0) for one in running))
                await client.stop_pause()
                await client.shutdown()
        except (Error, OSError) as error:
            log.error(
                "sandbox %s: its shim cannot stop serving it and is killed: %s",
                sandbox.id,
                str(error) or "it does not answer",
            )
        else:
            sandbox.shim = None
            # Earlier versions recorded a path below /proc of the shim. This shim may later have
            # another pod's namespace at the same number.
            sandbox.netns_path = path_after_take_over(sandbox.netns_path, "")

    async def _take_over_pod(
        self, sandbox: Sandbox, living: Sequence[Container], sessions: Sequence[ExecSession]
    ) -> None:
        if self._connection(sandbox) is None:
            await shield_until_done(self.start(sandbox))  # a cancelled fork would leave a shim
        client = self._still_connected(sandbox)
        stored = await self.stored.ids()
        if sandbox.id in stored:
            with contextlib.suppress(AlreadyExists):  # taken over by an earlier attempt
                await self._take_over_pause(sandbox, client)
        for container in living:
            if container.id in stored:
                lost = [one for one in sessions if one.container == container.id]
                with contextlib.suppress(AlreadyExists):
                    await self._take_over_container(container, client, lost)
            elif container.running or orphans.was_started(container):
                await self._end_orphan(sandbox, container)
        self._apply_state(sandbox, await client.state())
        await self._write_move(sandbox)
        self._still_connected(sandbox)

    async def _take_over_pause(self, sandbox: Sandbox, client: ShimClient) -> None:
        path = await client.take_over_pause()
        sandbox.netns_path = path_after_take_over(sandbox.netns_path, path or "")

    async def _take_over_container(
        self, container: Container, client: ShimClient, sessions: Sequence[ExecSession]
    ) -> None:
        stdin, once = self._stdins.pop(container), container.config.stdin_once
        try:
            await client.take_over_container(container.id, sessions, stdin, stdin_once=once)
        finally:
            close_all(stdin)

    async def _take_over_rest(
        self, sandbox: Sandbox, client: ShimClient, state: messages.PodState
    ) -> messages.PodState:
        """Complete a take-over that the server's death interrupted: have the shim take over the
        remaining processes. Return the shim's new state of the pod."""
        ids = {entry.id for entry in state.containers}
        containers = self._index.containers_of(sandbox)
        rest = [
            c for c in containers if c.exit is None and c.process is not None and c.id not in ids
        ]
        lacks_pause = state.pause is None and sandbox.pause is not None
        if sandbox.phase != "ready" or not (rest or lacks_pause):
            return state
        try:
            stored = await self.stored.ids()
            if lacks_pause and sandbox.id in stored:
                await self._take_over_pause(sandbox, client)
            for container in rest:
                if container.id in stored:
                    await client.take_over_container(container.id)
            return await client.state()
        except (Error, OSError) as error:
            log.error(
                "sandbox %s: its shim cannot take over all containers of the pod: %s",
                sandbox.id,
                error,
            )
            return state

    async def _end_interrupted_starts(
        self, sandbox: Sandbox, client: ShimClient, state: messages.PodState
    ) -> messages.PodState:
        """Have the shim abort all starts of containers that are still in progress. Return the
        shim's new state of the pod.

        The callers of these starts received an error when the connection to the shim was lost, and
        may create other containers instead.
        """
        starting = [one.id for one in state.containers if not one.pid and one.exit is None]
        if not starting:
            return state
        for container_id in starting:
            log.warning("container %s: its start was interrupted and is aborted", container_id)
        stops = [client.stop(container_id, signal.SIGKILL, 0.0) for container_id in starting]
        for outcome in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.error("sandbox %s: cannot abort a container's start: %s", sandbox.id, outcome)
        with contextlib.suppress(Error):
            return await client.state()
        return state

    def _still_connected(self, sandbox: Sandbox) -> ShimClient:
        """Return the connection to the shim that is taking over the pod. Raises Unavailable when
        this shim has died, too."""
        client = self._connection(sandbox)
        if client is None:
            raise Unavailable(f"the shim that takes over sandbox {sandbox.id} has ended, too")
        return client

    async def _write_move(self, sandbox: Sandbox) -> None:
        """Save which shim serves the pod now. A failure is only logged, because after a restart the
        server asks the shim (`_finish_take_over`)."""
        try:
            await self.on_moved(sandbox)
        except (Error, OSError) as error:
            log.error(
                "sandbox %s: cannot write to disk which shim serves it now: %s", sandbox.id, error
            )

    async def _finish_take_over(self, sandbox: Sandbox, state: messages.PodState) -> None:
        """Complete a take-over that the server's death interrupted. Save which shim serves the pod.
        End the containers that this shim has not taken over, because no process observes their
        exits."""
        ids = {entry.id for entry in state.containers}
        for container in self._index.containers_of(sandbox):
            if container.exit is None and container.process is not None and container.id not in ids:
                await self._end_orphan(sandbox, container)
        started = alive_since(state.pid)
        if started is None or sandbox.shim == ProcessIdentity(state.pid, started):
            return
        sandbox.shim = ProcessIdentity(state.pid, started)
        if state.pause is not None:
            sandbox.netns_path = path_after_take_over(sandbox.netns_path, state.netns or "")
        elif sandbox.pause is not None:
            orphans.kill_process(sandbox.pause)
        await self._write_move(sandbox)

    async def _ask_state(self, sandbox: Sandbox, client: ShimClient) -> messages.PodState:
        """Return the shim's state of the pod, without a deadline. Until the answer comes, derive
        the state from the pod's processes."""
        answer = asyncio.ensure_future(client.state())
        try:
            while not (await asyncio.wait([answer], timeout=SILENT_POLL_S))[0]:
                self._derive_states(sandbox)
            return answer.result()
        finally:
            answer.cancel()

    def _derive_states(self, sandbox: Sandbox) -> None:
        """Run `_read_states`. If a system call fails, log this; the states that were not read yet
        stay unchanged."""
        try:
            self._read_states(sandbox)
        except OSError as error:
            log.warning("sandbox %s: cannot read the state of its processes: %s", sandbox.id, error)

    def _read_states(self, sandbox: Sandbox) -> None:
        """Derive the states of a pod whose shim does not answer: from the pod's processes and from
        the exit.json of each container."""
        pause_was_alive = sandbox.pause_alive
        sandbox.pause_alive = bool(sandbox.pause and sandbox.pause.alive())
        if pause_was_alive and not sandbox.pause_alive:
            self.on_exit(sandbox, None)
        for container in self._index.containers_of(sandbox):
            orphans.read_records(self._paths, container)
            process = container.process
            if process is not None:
                container.lost = container.exit is None and not process.alive()
            else:
                container.lost = container.exit is None and (
                    not self._paths.container_state(container.id).is_dir()
                    or orphans.was_started(container)
                )

    def _apply_state(self, sandbox: Sandbox, state: messages.PodState) -> None:
        """Copy the shim's state of the pod into the server's index. If the state folder of a
        container that the shim reports was deleted, make it again."""
        sandbox.pause_alive = state.pause_running
        if state.pause is not None:
            sandbox.pause = ProcessIdentity(state.pause.pid, state.pause.start_time)
        known = {entry.id: entry for entry in state.containers}
        for container in self._index.containers_of(sandbox):
            container.lost = False
            # The shim's state takes precedence: by the disk alone a running container whose folder
            # was deleted would be EXITED, and kubelet would start another one beside it.
            entry = known.get(container.id)
            if entry is None:
                self._end_without_folder(container)
                continue
            self._restore_folder(container)
            if entry.pid:
                container.process = ProcessIdentity(entry.pid, entry.start_time)
            container.started_at_ns = container.started_at_ns or entry.started_at_ns
            if entry.exit is not None and container.exit is None:
                container.set_exit(entry.exit)
                self.on_exit(sandbox, container)

    def _end_without_folder(self, container: Container) -> None:
        """If the container's state folder was deleted, set its exit to unknown, because exit.json
        was in that folder."""
        if container.exit is None and not self._paths.container_state(container.id).is_dir():
            container.set_exit(Exit.unknown(container.created_at_ns))

    def _restore_folder(self, container: Container) -> None:
        """Make a container's deleted state folder again, because the shim will write exit.json
        there."""
        folder = self._paths.container_state(container.id)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            return
        except OSError as error:
            log.error(
                "container %s: cannot create its state folder %s: %s", container.id, folder, error
            )
            return
        log.warning(
            "container %s: its state folder %s was deleted while it runs; created again",
            container.id,
            folder,
        )

    async def replace_outdated(self) -> bool:
        """End the shims of other versions, one at a time, and have shims of this version take over
        their pods. If the keeper does not store the descriptors of all running processes of a shim,
        this shim keeps running until its pods end. Return False if a shim keeps running because it
        cannot write a log; the caller must then try again later."""
        all_ended = True
        pods: dict[ProcessIdentity, list[Sandbox]] = {}
        for sandbox in self._index.sandboxes:
            if (
                sandbox.shim is not None
                and sandbox.shim not in self.processes.of_this_version
                and self.find(sandbox) is not None
            ):
                pods.setdefault(sandbox.shim, []).append(sandbox)
        for process, sandboxes in pods.items():
            running = [c.id for s in sandboxes for c in self._index.containers_of(s) if c.running]
            if {*running, *(s.id for s in sandboxes if s.pause_alive)} <= await self.stored.ids():
                log.info("shim %d has another version: its pods move to another shim", process.pid)
                # The pods then move as after any death of a shim. Three pods with four containers
                # moved within 20 ms (measured).
                self._save_stdins(process)
                if not await self.processes.end_outdated(process):
                    for container_id in running:
                        self._stdins.close(container_id)
                    all_ended = False
                    continue
                await asyncio.gather(
                    *(self._wait_until_moved(sandbox, process) for sandbox in sandboxes)
                )
        return all_ended

    async def _wait_until_moved(self, sandbox: Sandbox, process: ProcessIdentity) -> None:
        client = self._clients.get(sandbox.id)
        while client is not None and not client.closed and process.alive():
            await asyncio.sleep(KILLED_POLL_S)
        await self.reach(sandbox)
        await self.drain(sandbox)

    async def kill_pod(self, sandbox: Sandbox) -> None:
        """Kill the pod's unresponsive shim and end all processes of the pod."""
        awaited = self._answers.pop(sandbox.id, None)
        if awaited is not None:
            awaited.cancel()
        self.drop(sandbox)
        await self._end_once(sandbox)

    async def shutdown(self, sandbox: Sandbox) -> None:
        """Have the shim stop serving the pod. Does nothing when the shim is gone. Raises WrongState
        while a process of the pod runs."""
        client = self.find(sandbox)
        if client is not None:
            await client.shutdown()
            sandbox.shim = None  # it may live on for other pods
        await self.drain(sandbox)
        self._forget(sandbox)
        sandbox.reachable = False

    def drop(self, sandbox: Sandbox) -> None:
        """Close the connection to the pod's unresponsive shim."""
        client = self._forget(sandbox)
        if client is not None:
            client.close()
        sandbox.reachable = False

    def _forget(self, sandbox: Sandbox) -> ShimClient | None:
        """Remove the sandbox's connection and return it, for the caller to close; None without a
        connection."""
        self._pods.pop(sandbox.id, None)
        return self._clients.pop(sandbox.id, None)

    def disconnect(self) -> None:
        """Close all connections. The shims keep running."""
        for task in self._answers.values():
            task.cancel()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._stdins.close()
        self.processes.close()

    async def drain(self, sandbox: Sandbox | None = None) -> None:
        """Wait until all running reconnections to shims, and clean-ups after dead shims, have
        ended. With `sandbox`, wait only for those of this sandbox."""
        all_tasks = [*self._ending.items(), *self._reconnecting.items()]
        tasks = [task for name, task in all_tasks if sandbox is None or name == sandbox.id]
        if tasks:
            await asyncio.wait(tasks)

    def _event(self, sandbox: Sandbox, event: messages.Event) -> None:
        if isinstance(event, messages.PauseExited):
            sandbox.pause_alive = False
            self._earlier.end_stopped()
            self.on_exit(sandbox, None)
        elif isinstance(event, Exit):
            container = self._index.containers.find(event.container or "")
            # The exit may be known already, read from exit.json while the shim was silent.
            if container is not None and container.exit is None:
                container.set_exit(event)
                self._earlier.end_stopped()
                self.on_exit(sandbox, container)

    def _closed(self, sandbox: Sandbox, client: ShimClient) -> None:
        self._forget(sandbox)
        self._lost_sessions[sandbox.id] = client.lost_sessions
        sandbox.reachable = False
        log.warning("sandbox %s: the connection to its shim is lost", sandbox.id)
        # The shim is dead, or has closed the connection because the server did not read its events.
        task = asyncio.get_running_loop().create_task(self.reach(sandbox))
        self._reconnecting[sandbox.id] = task
        task.add_done_callback(lambda task: self._reconnecting.pop(sandbox.id, None))

    async def drop_unknown(self) -> None:
        """Close the descriptors in the keeper that belong neither to a known pod nor to a running
        or created container. A shim leaves such descriptors if it is killed after the end of a
        process, but before it has reported this end to the keeper.

        Also kill the shims of the previous version that were stopped with SIGSTOP, once all their
        children have ended.
        """
        ids = {sandbox.id for sandbox in self._index.sandboxes}
        ids |= {container.id for container in self._index.containers if container.exit is None}
        await self.stored.drop(*(await self.stored.ids(tries=1) - ids))
        self._earlier.end_stopped()

    async def _end_once(self, sandbox: Sandbox) -> None:
        """Run `end_orphans` for the sandbox. If a run for this sandbox is under way, wait for that
        run instead."""
        task = self._ending.get(sandbox.id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self.end_orphans(sandbox))
            self._ending[sandbox.id] = task
            task.add_done_callback(lambda task: self._ending.pop(sandbox.id, None))
        await asyncio.shield(task)

    async def end_orphans(self, sandbox: Sandbox) -> None:
        """Clean up after the sandbox's shim, which has died or dropped the pod: read the files that
        it has written, then end the sandbox's pause process and the containers that still run.

        No process reads these containers' output any more and their exit codes are lost, so they
        end with reason Unknown.
        """
        # First of all: a client that sees an ended container must also see that the pod is not
        # ready.
        sandbox.pause_alive = False
        self._lost_sessions.pop(sandbox.id, None)
        await self._end_rest_of_shim(sandbox)
        await self.stored.drop(sandbox.id)
        for container in self._index.containers_of(sandbox):
            await self._end_orphan(sandbox, container)
        if sandbox.pause is not None:
            orphans.kill_process(sandbox.pause)
        await orphans.kill_group(sandbox.cgroups_path, sandbox.id)
        self.on_exit(sandbox, None)

    def _kill_shim(self, sandbox: Sandbox) -> None:
        # A shim that stops serving the pod removes its shim.json from the pod's folder.
        record = self._paths.sandbox_state(sandbox.id) / messages.SHIM_RECORD
        if sandbox.shim is not None and record.exists():
            orphans.kill_process(sandbox.shim)

    async def _end_rest_of_shim(self, sandbox: Sandbox) -> None:
        self._kill_shim(sandbox)
        await orphans.wait_for_forks(self._paths, sandbox.id)

    async def _end_orphan(self, sandbox: Sandbox, container: Container) -> None:
        self._stdins.close(container.id)
        await self.stored.drop(container.id)
        # Its cgroup may still exist, after a failed start or an unfinished removal.
        if container.exit is not None:
            await orphans.kill_group(container.cgroups_path, container.id)
            return
        orphans.read_records(self._paths, container)
        if container.exit is None and (container.process or orphans.was_started(container)):
            await orphans.end_container(self._paths, container)
        else:
            await orphans.kill_group(container.cgroups_path, container.id)
        self._end_without_folder(container)
        if container.exit is not None:
            self.on_exit(sandbox, container)


async def _ignore_move(sandbox: Sandbox) -> None:
    pass
