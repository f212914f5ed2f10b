"""What the verbs say to plugins: each event once, to all plugins in the order of their indices, one
event at a time.

A plugin that joins is told of everything under the same lock: what happens meanwhile waits, and
reaches it as an event. A container whose creation plugins have heard of, but that is not listed
yet, is part of what it is told. What plugins ask for other containers is carried out without the
lock and without the lock of any container, so that no two requests wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cri_server.api import api_pb2 as cri
from cri_server.api import nri_pb2 as api
from cri_server.containers import stop, update
from cri_server.nri import adjust, convert, launch
from cri_server.nri.merge import Merge
from cri_server.nri.plugin import Plugin, Timeouts
from cri_server.observability.lifecycle import LifecycleObserver
from cri_server.rpc.server import unlink_stale
from cri_server.services import Services
from cri_server.spec import block_io, cdi, groups, rdt, resources, sources
from cri_server.store.model import Container, Sandbox
from pyrunc import atomic_file
from pyrunc.errors import Error, InvalidArgument, PeerError, Unavailable, WrongState

log = logging.getLogger(__name__)

CREATED, RUNNING, STOPPED = "created", "running", "stopped"
SOCKET_MODE = 0o600
STRANGERS_LIMIT = 32  # connections that have not registered yet


class Nri(LifecycleObserver):
    """The plugins of this server."""

    def __init__(self, services: Services) -> None:
        self._services, self._settings = services, services.config.nri
        self._timeouts = Timeouts(
            self._settings.registration_timeout_s, self._settings.request_timeout_s
        )
        self._plugins: list[Plugin] = []
        self._turn = asyncio.Lock()
        self._states: dict[str, str] = {}  # of pods and containers that plugins know; none: removed
        self._pods_in_making: dict[str, api.PodSandbox] = {}
        self._containers_in_making: dict[str, api.Container] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._joining: dict[Plugin, asyncio.Task[None]] = {}
        self._leaving: set[launch.Launched] = set()
        self._listener: asyncio.Server | None = None

    # -- life

    async def start(self) -> None:
        """Start the plugins of the folder and wait for them, then listen for others. Raises
        WrongState."""
        for sandbox in self._services.index.sandboxes:
            self._states[sandbox.id] = RUNNING if sandbox.state == cri.SANDBOX_READY else STOPPED
        for container in self._services.index.containers:
            state = RUNNING if container.running else CREATED
            self._states[container.id] = STOPPED if container.exit is not None else state
        programs = launch.find(
            Path(self._settings.plugin_dir), Path(self._settings.plugin_config_dir)
        )
        started = [
            plugin for plugin in [await self._launch(program) for program in programs] if plugin
        ]
        await asyncio.gather(*(self._join(plugin) for plugin in started))
        if not self._settings.disable_external:
            await self._listen()

    async def close(self) -> None:
        """Let go of all plugins; those that were started end."""
        path = Path(self._settings.socket)
        if self._listener is not None:
            self._listener.close()
            path.unlink(missing_ok=True)
        for plugin in [*self._plugins, *self._joining]:
            plugin.close()
        tasks = [*self._joining.values(), *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * launch.GRACE_S):
                await asyncio.gather(*(process.ended.wait() for process in self._leaving))

    async def _launch(self, program: launch.Program) -> Plugin | None:
        plugin = self._new()
        plugin.index, plugin.base, plugin.config = program.index, program.name, program.config
        try:
            plugin.launched, ours = launch.Launched.start(program)
        except OSError as error:
            log.error("NRI plugin %s cannot be started: %s", program.path, error.strerror)
            return None
        self._leaving.add(plugin.launched)
        ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: plugin.connection, ours)
        return plugin

    async def _listen(self) -> None:
        path = Path(self._settings.socket)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unlink_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o777 & ~SOCKET_MODE)
            try:
                sock.bind(str(path))
            finally:
                os.umask(before)
            self._listener = await asyncio.get_running_loop().create_unix_server(
                self._accepted, sock=sock
            )
        except OSError as error:
            sock.close()
            raise WrongState(f"nri.socket {path}: {error.strerror or error}") from None
        log.info("NRI plugins connect to %s", path)

    def _accepted(self) -> asyncio.Protocol:
        plugin = self._new()
        if len(self._joining) >= STRANGERS_LIMIT:
            log.warning(
                "NRI: %d plugins are registering: another one is turned away", STRANGERS_LIMIT
            )
            plugin.close()
        else:
            self._joining[plugin] = asyncio.get_running_loop().create_task(
                self._join_stranger(plugin)
            )
        return plugin.connection

    def _new(self) -> Plugin:
        return Plugin(self._timeouts, self._unsolicited, self._dropped)

    async def _join_stranger(self, plugin: Plugin) -> None:
        try:
            await self._join(plugin)
        finally:
            self._joining.pop(plugin, None)

    async def _join(self, plugin: Plugin) -> None:
        """Registration, configuration, synchronization; from then on it hears of every event."""
        try:
            await plugin.register()
            async with self._turn:
                response = await plugin.synchronize(*await self._everything())
                if not plugin.open:
                    raise PeerError(f"NRI plugin {plugin.name} left while it was synchronized")
                self._plugins.append(plugin)
                self._plugins.sort(key=lambda known: known.index)
            log.info("NRI plugin %s has joined", plugin.name)
            wishes = Merge()
            wishes.add(plugin.name, response)
            await self._carry_out(wishes)
        except Error as error:
            log.error("%s", error)
            plugin.close()
        except Exception:
            log.exception("NRI plugin %s: not expected", plugin.name)
            plugin.close()

    async def _everything(self) -> tuple[list[api.PodSandbox], list[api.Container]]:
        index = self._services.index
        pods = {s.id: convert.pod(s) for s in index.sandboxes if s.id in self._states}
        containers = {}
        for container in index.containers:
            if self._states.get(container.id) in (CREATED, RUNNING) and container.exit is None:
                containers[container.id] = convert.container(container, await self._spec(container))
        return (
            list({**self._pods_in_making, **pods}.values()),
            list({**self._containers_in_making, **containers}.values()),
        )

    async def _spec(self, container: Container) -> Mapping[str, Any]:
        path = self._services.paths.container_state(container.id) / "config.json"
        try:
            return await asyncio.to_thread(atomic_file.read_json, str(path))
        except (Error, OSError):  # of an earlier boot
            return {}

    def _dropped(self, plugin: Plugin) -> None:
        if plugin in self._plugins:
            self._plugins.remove(plugin)
            log.info("NRI plugin %s has left", plugin.name)

    # -- pods

    async def run_pod(self, sandbox: Sandbox) -> None:
        """Before the pod is listed. Raises PeerError: a plugin refuses it."""
        async with self._turn:
            self._states[sandbox.id] = RUNNING
            known = self._services.index.sandboxes
            self._pods_in_making = {
                i: m for i, m in self._pods_in_making.items() if known.find(i) is None
            }
            pod = self._pods_in_making[sandbox.id] = convert.pod(sandbox)
            await self._tell(api.RUN_POD_SANDBOX, api.RunPodSandboxRequest(pod=pod))

    async def update_pod(
        self,
        sandbox: Sandbox,
        overhead: cri.LinuxContainerResources,
        limits: cri.LinuxContainerResources,
    ) -> None:
        """Before the figures are kept. Raises PeerError."""
        request = api.UpdatePodSandboxRequest(
            pod=convert.pod(sandbox),
            overhead_linux_resources=convert.from_cri(overhead),
            linux_resources=convert.from_cri(limits),
        )
        async with self._turn:
            await self._tell(api.UPDATE_POD_SANDBOX, request)

    async def updated_pod(self, sandbox: Sandbox) -> None:
        async with self._turn:
            request = api.PostUpdatePodSandboxRequest(pod=convert.pod(sandbox))
            await self._tell(api.POST_UPDATE_POD_SANDBOX, request, must=False)

    async def stop_pod(self, sandbox: Sandbox) -> None:
        """Its containers have ended, its network is still there. Once for each pod."""
        async with self._turn:
            if self._states.get(sandbox.id) == RUNNING:
                self._states[sandbox.id] = STOPPED
                request = api.StopPodSandboxRequest(pod=convert.pod(sandbox))
                await self._tell(api.STOP_POD_SANDBOX, request, must=False)

    async def remove_pod(self, sandbox: Sandbox) -> None:
        """Once for each pod."""
        async with self._turn:
            self._pods_in_making.pop(sandbox.id, None)
            if self._states.pop(sandbox.id, None) is not None:
                request = api.RemovePodSandboxRequest(pod=convert.pod(sandbox))
                await self._tell(api.REMOVE_POD_SANDBOX, request, must=False)

    # -- containers

    async def create_container(
        self, sandbox: Sandbox, container: Container, spec: dict[str, Any]
    ) -> None:
        """Let plugins adjust `spec`, and with it what `container` says of its cgroup and limits.

        Raises Conflict, PeerError (a plugin refuses), Unavailable (a required plugin is not there),
        InvalidArgument.
        """
        async with self._turn:
            self._expect_required()
            self._states[container.id] = CREATED
            message = convert.container(container, spec, made=False)
            self._containers_in_making[container.id] = message
            pod = convert.pod(sandbox)
            merge = await self._ask_for_adjustment(pod, message)
        await self._carry_out(merge)
        if merge.adjustment.ByteSize():
            await self._adjust(container, spec, merge.adjustment)
            self._containers_in_making[container.id] = convert.container(container, spec)

    async def _ask_for_adjustment(self, pod: api.PodSandbox, container: api.Container) -> Merge:
        pristine = api.Container()
        pristine.CopyFrom(container)
        current = api.Container()
        current.CopyFrom(container)
        merge = Merge(container=current)
        consulted = list(self._plugins)
        for plugin in consulted:
            request = api.CreateContainerRequest(pod=pod, container=current)
            response = await plugin.ask(api.CREATE_CONTAINER, request)
            if response is not None:
                merge.add(plugin.name, response)
        validators = [p for p in consulted if p.wants(api.VALIDATE_CONTAINER_ADJUSTMENT)]
        if validators:
            question = api.ValidateContainerAdjustmentRequest(
                pod=pod,
                container=pristine,
                adjust=merge.adjustment,
                update=list(merge.updates.values()),
                owners=merge.owners.message,
                plugins=[api.PluginInstance(name=p.base, index=p.index) for p in consulted],
            )
            await asyncio.gather(*(self._validate(plugin, question) for plugin in validators))
        return merge

    async def _validate(
        self, plugin: Plugin, request: api.ValidateContainerAdjustmentRequest
    ) -> None:
        """A validator that does not answer has not agreed."""
        response = await plugin.ask(api.VALIDATE_CONTAINER_ADJUSTMENT, request)
        if response is None:
            raise PeerError(f"NRI validator {plugin.name} did not answer")
        if response.reject:
            raise PeerError(f"NRI validator {plugin.name} rejects the container: {response.reason}")

    def _expect_required(self) -> None:
        there = {name for plugin in self._plugins for name in (plugin.base, plugin.name)}
        missing = [name for name in self._services.config.nri.required_plugins if name not in there]
        if missing:
            raise Unavailable(f"required NRI plugins are not there: {', '.join(missing)}")

    async def _adjust(
        self, container: Container, spec: dict[str, Any], adjustment: api.ContainerAdjustment
    ) -> None:
        node, settings = self._services.node, self._services.config.containers
        adjust.apply(
            spec,
            adjustment,
            lambda score: resources.clamp_oom_score_adj(score, node.oom_score_adj_floor),
            lambda name: block_io.to_oci(settings.block_io_classes, name),
            lambda name: rdt.to_oci(settings.rdt_classes, name),
        )
        names = cdi.names([device.name for device in adjustment.CDI_devices], {})
        if names:
            edits = await sources.run_with_deadline(
                settings.foreign_path_timeout_s, "CDI files", cdi.resolve, names, settings.cdi_dirs
            )
            cdi.apply(spec, edits)
        merged = resources.merge(container.resources, convert.to_cri(adjustment.linux.resources))
        if adjustment.linux.HasField("oom_score_adj"):
            merged.oom_score_adj = spec["process"]["oomScoreAdj"]
        resources.check(merged)
        if adjustment.linux.cgroups_path:
            self._require_own_group(container.id, adjustment.linux.cgroups_path)
            container.cgroups_path = adjustment.linux.cgroups_path
        container.resources = merged

    def _require_own_group(self, identifier: str, path: str) -> None:
        """Raises InvalidArgument for a cgroup that is there, or will be another container's: what
        is in the cgroup of a container is killed with it."""
        in_making = {
            i: message.linux.cgroups_path for i, message in self._containers_in_making.items()
        }
        listed = {other.id: other.cgroups_path for other in self._services.index.containers}
        others = [taken for i, taken in (listed | in_making).items() if i != identifier]
        if path in others or groups.place(path, identifier).exists():
            raise InvalidArgument(
                f"NRI: linux.cgroups_path {path[:200]!r} is a cgroup that is not new"
            )

    async def created_container(self, sandbox: Sandbox, container: Container) -> None:
        """It is listed now."""
        async with self._turn:
            self._containers_in_making.pop(container.id, None)
            request = await self._about(api.PostCreateContainerRequest, sandbox, container)
            await self._tell(api.POST_CREATE_CONTAINER, request, must=False)

    async def start_container(self, sandbox: Sandbox, container: Container) -> None:
        """Before its process runs. Raises PeerError."""
        async with self._turn:
            self._states[container.id] = RUNNING
            request = await self._about(api.StartContainerRequest, sandbox, container)
            await self._tell(api.START_CONTAINER, request)

    async def started_container(self, sandbox: Sandbox, container: Container) -> None:
        async with self._turn:
            request = await self._about(api.PostStartContainerRequest, sandbox, container)
            await self._tell(api.POST_START_CONTAINER, request, must=False)

    async def update_container(
        self, container: Container, limits: cri.LinuxContainerResources
    ) -> cri.LinuxContainerResources:
        """Returns the limits to set in place of `limits`. The container's lock must be free. Raises
        Conflict, PeerError."""
        asked = convert.from_cri(limits)
        merge = Merge(updated=container.id, wanted=asked)
        async with self._turn:
            request = await self._about(
                api.UpdateContainerRequest, self._sandbox(container), container
            )
            for plugin in list(self._plugins):
                request.linux_resources.CopyFrom(asked)
                response = await plugin.ask(api.UPDATE_CONTAINER, request)
                if response is not None:
                    merge.add(plugin.name, response)
        await self._carry_out(merge)
        result = convert.to_cri(asked)
        result.oom_score_adj = limits.oom_score_adj
        return result

    async def updated_container(self, container: Container) -> None:
        async with self._turn:
            request = await self._about(
                api.PostUpdateContainerRequest, self._sandbox(container), container
            )
            await self._tell(api.POST_UPDATE_CONTAINER, request, must=False)

    async def stop_container(self, container: Container) -> None:
        """It has ended, by itself or not, or will never run. Once for each container."""
        merge = Merge()
        async with self._turn:
            if self._states.get(container.id) in (CREATED, RUNNING):
                self._states[container.id] = STOPPED
                request = await self._about(
                    api.StopContainerRequest, self._sandbox(container), container
                )
                await self._tell(api.STOP_CONTAINER, request, must=False, merge=merge)
        await self._carry_out(merge)

    async def remove_container(self, container: Container) -> None:
        """Once for each container, after `stop_container`."""
        await self.stop_container(container)
        async with self._turn:
            self._containers_in_making.pop(container.id, None)
            if self._states.pop(container.id, None) is not None:
                request = await self._about(
                    api.RemoveContainerRequest, self._sandbox(container), container
                )
                await self._tell(api.REMOVE_CONTAINER, request, must=False)

    def container_ended(self, container: Container) -> None:
        """`stop_container`, in a task: nobody waits for it."""
        task = asyncio.get_running_loop().create_task(self._stopped(container))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _stopped(self, container: Container) -> None:
        try:
            await self.stop_container(container)
        except Exception:
            log.exception("NRI: the end of container %s: not expected", container.id)

    # -- inside

    def _sandbox(self, container: Container) -> Sandbox | None:
        return self._services.index.sandboxes.find(container.sandbox_id)

    async def _about(
        self, request: type[Any], sandbox: Sandbox | None, container: Container
    ) -> Any:
        if not self._plugins:
            return request()
        pod = api.PodSandbox(id=container.sandbox_id) if sandbox is None else convert.pod(sandbox)
        return request(pod=pod, container=convert.container(container, await self._spec(container)))

    async def _tell(
        self, event: int, request: Any, *, must: bool = True, merge: Merge | None = None
    ) -> None:
        """To all; with `must` an error of a plugin is one of the request, otherwise it is logged."""
        for plugin in list(self._plugins):
            try:
                response = await plugin.ask(event, request)
                if merge is not None and response is not None:
                    merge.add(plugin.name, response)
            except Error as error:
                if must:
                    raise
                log.warning("%s", error)

    async def _unsolicited(
        self, plugin: Plugin, request: api.UpdateContainersRequest
    ) -> Sequence[api.ContainerUpdate]:
        merge = Merge()
        merge.add(plugin.name, request)
        return await self._carry_out(merge)

    async def _carry_out(self, wishes: Merge) -> list[api.ContainerUpdate]:
        """Evict and update other containers; the updates that failed. Containers that are gone need
        neither."""
        known = self._services.index.containers
        for eviction in wishes.evictions:
            container = known.find(eviction.container_id)
            if container is not None:
                log.info(
                    "container %s is evicted by an NRI plugin: %s", container.id, eviction.reason
                )
                try:
                    await stop.kill(self._services, container)
                except Error as error:
                    log.warning("container %s, evicted by an NRI plugin: %s", container.id, error)
        failed = []
        for wish in wishes.updates.values():
            container = known.find(wish.container_id)
            if container is None:
                continue
            try:
                await update.apply(self._services, container, convert.to_cri(wish.linux.resources))
            except Error as error:
                if not wish.ignore_failure:
                    log.warning("container %s, updated by an NRI plugin: %s", container.id, error)
                    failed.append(wish)
        return failed
