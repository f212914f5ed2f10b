"""Sends lifecycle events to plugins: each event once, one at a time, to all plugins in order of
their indices.

One lock is held while an event is sent, and while a plugin that joins is synchronized. An event
that occurs meanwhile is sent afterwards, also to the new plugin. The synchronization includes pods
and containers that are being created and are not listed yet. Updates and evictions that a plugin
requests are performed without this lock and without a container's lock, so that two requests cannot
deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cri_server.api import api_pb2 as cri
from cri_server.api import nri_pb2 as api
from cri_server.containers import stop, update
from cri_server.nri import adjust, convert, launch
from cri_server.nri.merge import Merge
from cri_server.nri.plugin import METHODS, Plugin
from cri_server.observability.lifecycle import LifecycleObserver
from cri_server.rpc import unix_socket
from cri_server.services import Services
from cri_server.spec import block_io, cdi, groups, rdt, resources, sources
from cri_server.store.model import Container, Sandbox, copy
from pyrunc import atomic_file
from pyrunc.errors import Error, InvalidArgument, PeerError, Unavailable, WrongState

log = logging.getLogger(__name__)

CREATED, RUNNING, STOPPED = "created", "running", "stopped"
SOCKET_MODE = 0o600
JOINING_LIMIT = 32  # connections that are not registered yet


class NriObserver(LifecycleObserver):
    """The lifecycle observer that starts NRI plugins and sends the events to them."""

    def __init__(self, services: Services) -> None:
        self._services, self._settings = services, services.config.nri
        self._plugins: list[Plugin] = []
        self._lock = asyncio.Lock()
        self._states: dict[str, str] = {}  # of pods and containers that plugins know, by id
        self._pods_being_created: dict[str, api.PodSandbox] = {}
        self._containers_being_created: dict[str, api.Container] = {}
        self._notifications: set[asyncio.Task[None]] = set()
        self._joining: dict[Plugin, asyncio.Task[None]] = {}
        self._processes: set[launch.PluginProcess] = set()
        self._listener: asyncio.Server | None = None

    # -- start and end

    async def start(self) -> None:
        """Start the plugins of the plugin folder, wait until they have joined, then listen for
        external plugins. Raises WrongState when the socket for external plugins cannot be created.
        """
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
        """Close the connections of all plugins, and end the plugins that the server has started."""
        path = Path(self._settings.socket)
        if self._listener is not None:
            self._listener.close()
            path.unlink(missing_ok=True)
        for plugin in [*self._plugins, *self._joining]:
            plugin.close()
        tasks = [*self._joining.values(), *self._notifications]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * launch.GRACE_S):
                await asyncio.gather(*(process.ended.wait() for process in self._processes))

    async def _launch(self, program: launch.PluginProgram) -> Plugin | None:
        plugin = self._new_plugin()
        plugin.index, plugin.base_name, plugin.config = program.index, program.name, program.config
        try:
            plugin.process, ours = launch.PluginProcess.start(program)
        except OSError as error:
            log.error("NRI plugin %s cannot be started: %s", program.path, error.strerror)
            return None
        self._processes.add(plugin.process)
        ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: plugin.connection, ours)
        return plugin

    async def _listen(self) -> None:
        path = Path(self._settings.socket)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # A plugin acts with root's rights, so other users must not connect.
            sock = unix_socket.bind(path, SOCKET_MODE)
            self._listener = await asyncio.get_running_loop().create_unix_server(
                self._accepted, sock=sock
            )
        except OSError as error:
            raise WrongState(f"nri.socket {path}: {error.strerror or error}") from None
        log.info("NRI plugins connect to %s", path)

    def _accepted(self) -> asyncio.Protocol:
        plugin = self._new_plugin()
        if len(self._joining) >= JOINING_LIMIT:
            log.warning("NRI: refusing a connection: %d plugins are registering", JOINING_LIMIT)
            plugin.close()
        else:
            self._joining[plugin] = asyncio.get_running_loop().create_task(
                self._join_external(plugin)
            )
        return plugin.connection

    def _new_plugin(self) -> Plugin:
        return Plugin(self._settings, self._on_unsolicited_update, self._on_plugin_close)

    async def _join_external(self, plugin: Plugin) -> None:
        try:
            await self._join(plugin)
        finally:
            self._joining.pop(plugin, None)

    async def _join(self, plugin: Plugin) -> None:
        """Register, configure and synchronize a plugin. Afterwards the plugin gets all events."""
        try:
            await plugin.register()
            async with self._lock:
                response = await plugin.synchronize(*await self._all_objects())
                if not plugin.open:
                    raise PeerError(
                        f"NRI plugin {plugin.name} disconnected during its synchronization"
                    )
                self._plugins.append(plugin)
                self._plugins.sort(key=lambda each: each.index)
            log.info("NRI plugin %s has joined", plugin.name)
            merge = Merge()
            merge.add(plugin.name, response)
            await self._apply(merge)
        except Error as error:
            log.error("%s", error)
            plugin.close()
        except Exception:
            log.exception("NRI plugin %s: unexpected error", plugin.name)
            plugin.close()

    async def _all_objects(self) -> tuple[list[api.PodSandbox], list[api.Container]]:
        index = self._services.index
        pods = {s.id: convert.pod(s) for s in index.sandboxes if s.id in self._states}
        containers = {}
        for container in index.containers:
            if self._states.get(container.id) in (CREATED, RUNNING) and container.exit is None:
                containers[container.id] = convert.container(container, await self._spec(container))
        return (
            list({**self._pods_being_created, **pods}.values()),
            list({**self._containers_being_created, **containers}.values()),
        )

    async def _spec(self, container: Container) -> Mapping[str, Any]:
        path = self._services.paths.container_state(container.id) / "config.json"
        try:
            return await asyncio.to_thread(atomic_file.read_json, str(path))
        except (Error, OSError):  # of an earlier boot
            return {}

    def _on_plugin_close(self, plugin: Plugin) -> None:
        if plugin in self._plugins:
            self._plugins.remove(plugin)
            log.info("NRI plugin %s has left", plugin.name)

    # -- pods

    async def run_pod(self, sandbox: Sandbox) -> None:
        """Send RunPodSandbox, before the pod is listed. Raises PeerError if a plugin refuses."""
        async with self._lock:
            self._states[sandbox.id] = RUNNING
            sandboxes = self._services.index.sandboxes
            self._pods_being_created = {
                i: m for i, m in self._pods_being_created.items() if sandboxes.find(i) is None
            }
            pod = self._pods_being_created[sandbox.id] = convert.pod(sandbox)
            await self._notify(api.RUN_POD_SANDBOX, api.RunPodSandboxRequest(pod=pod))

    async def update_pod(
        self,
        sandbox: Sandbox,
        overhead: cri.LinuxContainerResources,
        limits: cri.LinuxContainerResources,
    ) -> None:
        """Send UpdatePodSandbox with the pod's new overhead and limits, before they are stored.
        Raises PeerError if a plugin refuses."""
        request = api.UpdatePodSandboxRequest(
            pod=convert.pod(sandbox),
            overhead_linux_resources=convert.from_cri(overhead),
            linux_resources=convert.from_cri(limits),
        )
        async with self._lock:
            await self._notify(api.UPDATE_POD_SANDBOX, request)

    async def updated_pod(self, sandbox: Sandbox) -> None:
        async with self._lock:
            await self._announce(api.POST_UPDATE_POD_SANDBOX, sandbox)

    async def stop_pod(self, sandbox: Sandbox) -> None:
        """Send StopPodSandbox, once per pod, after its containers have ended and while its network
        still exists."""
        async with self._lock:
            if self._states.get(sandbox.id) == RUNNING:
                self._states[sandbox.id] = STOPPED
                await self._announce(api.STOP_POD_SANDBOX, sandbox)

    async def remove_pod(self, sandbox: Sandbox) -> None:
        """Send RemovePodSandbox, once per pod."""
        async with self._lock:
            self._pods_being_created.pop(sandbox.id, None)
            if self._states.pop(sandbox.id, None) is not None:
                await self._announce(api.REMOVE_POD_SANDBOX, sandbox)

    # -- containers

    async def create_container(
        self, sandbox: Sandbox, container: Container, spec: dict[str, Any]
    ) -> None:
        """Send CreateContainer, and apply the plugins' adjustments to `spec`, and to the cgroup and
        limits of `container`.

        Raises PeerError (a plugin refuses), Conflict (two plugins set the same field), Unavailable
        (a required plugin is missing), InvalidArgument (an adjustment has an invalid value).
        """
        async with self._lock:
            self._check_required()
            self._states[container.id] = CREATED
            message = convert.container(container, spec, created=False)
            self._containers_being_created[container.id] = message
            pod = convert.pod(sandbox)
            merge = await self._ask_for_adjustment(pod, message)
        await self._apply(merge)
        if merge.adjustment.ByteSize():
            await self._adjust(container, spec, merge.adjustment)
            self._containers_being_created[container.id] = convert.container(container, spec)

    async def _ask_for_adjustment(self, pod: api.PodSandbox, container: api.Container) -> Merge:
        current = copy(container)
        merge = Merge(container=current)
        # A copy, because a plugin that is dropped meanwhile leaves `self._plugins`.
        consulted = list(self._plugins)
        for plugin in consulted:
            request = api.CreateContainerRequest(pod=pod, container=current)
            response = await plugin.request(api.CREATE_CONTAINER, request)
            if response is not None:
                merge.add(plugin.name, response)
        validators = [p for p in consulted if p.is_subscribed(api.VALIDATE_CONTAINER_ADJUSTMENT)]
        if validators:
            validation = api.ValidateContainerAdjustmentRequest(
                pod=pod,
                container=container,
                adjust=merge.adjustment,
                update=list(merge.updates.values()),
                owners=merge.owners.message,
                plugins=[api.PluginInstance(name=p.base_name, index=p.index) for p in consulted],
            )
            await asyncio.gather(*(self._validate(plugin, validation) for plugin in validators))
        return merge

    async def _validate(
        self, plugin: Plugin, request: api.ValidateContainerAdjustmentRequest
    ) -> None:
        """Ask a validating plugin whether the merged adjustment of a container is permitted. Raises
        PeerError, which refuses the container, if the plugin rejects the adjustment or does not
        answer in time."""
        response = await plugin.request(api.VALIDATE_CONTAINER_ADJUSTMENT, request)
        if response is None:
            raise PeerError(f"NRI validator {plugin.name} did not answer")
        if response.reject:
            raise PeerError(f"NRI validator {plugin.name} rejects the container: {response.reason}")

    def _check_required(self) -> None:
        there = {name for plugin in self._plugins for name in (plugin.base_name, plugin.name)}
        missing = [name for name in self._services.config.nri.required_plugins if name not in there]
        if missing:
            raise Unavailable(f"required NRI plugins are missing: {', '.join(missing)}")

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
        """Raise InvalidArgument if the cgroup `path`, which a plugin requests, exists or belongs to
        another container."""
        in_making = {
            i: message.linux.cgroups_path for i, message in self._containers_being_created.items()
        }
        listed = {other.id: other.cgroups_path for other in self._services.index.containers}
        others = [taken for i, taken in (listed | in_making).items() if i != identifier]
        # All processes of a container's cgroup are killed with it: a plugin could end another pod.
        if path in others or groups.place(path, identifier).exists():
            raise InvalidArgument(f"NRI: linux.cgroups_path {path[:200]!r} is an existing cgroup")

    async def created_container(self, sandbox: Sandbox, container: Container) -> None:
        """Send PostCreateContainer, after the container is listed."""
        async with self._lock:
            self._containers_being_created.pop(container.id, None)
            await self._announce(api.POST_CREATE_CONTAINER, sandbox, container)

    async def start_container(self, sandbox: Sandbox, container: Container) -> None:
        """Send StartContainer, before the process runs. Raises PeerError if a plugin refuses."""
        async with self._lock:
            self._states[container.id] = RUNNING
            await self._announce(api.START_CONTAINER, sandbox, container, may_refuse=True)

    async def started_container(self, sandbox: Sandbox, container: Container) -> None:
        async with self._lock:
            await self._announce(api.POST_START_CONTAINER, sandbox, container)

    async def update_container(
        self, container: Container, limits: cri.LinuxContainerResources
    ) -> cri.LinuxContainerResources:
        """Send UpdateContainer; return the limits to set in place of `limits`. The caller must not
        hold the container's lock. Raises PeerError if a plugin refuses, Conflict if two plugins set
        the same limit, InvalidArgument for a limit outside of CRI's range."""
        merged_limits = convert.from_cri(limits)
        merge = Merge(updated=container.id, limits=merged_limits)
        async with self._lock:
            request = await self._request(api.UPDATE_CONTAINER, self._sandbox(container), container)
            for plugin in list(self._plugins):
                request.linux_resources.CopyFrom(merged_limits)
                response = await plugin.request(api.UPDATE_CONTAINER, request)
                if response is not None:
                    merge.add(plugin.name, response)
        await self._apply(merge)
        result = convert.to_cri(merged_limits)
        result.oom_score_adj = limits.oom_score_adj
        return result

    async def updated_container(self, container: Container) -> None:
        async with self._lock:
            await self._announce(api.POST_UPDATE_CONTAINER, self._sandbox(container), container)

    async def stop_container(self, container: Container) -> None:
        """Send StopContainer for a container that has ended or will never run, once per
        container."""
        merge = Merge()
        async with self._lock:
            if self._states.get(container.id) in (CREATED, RUNNING):
                self._states[container.id] = STOPPED
                await self._announce(
                    api.STOP_CONTAINER, self._sandbox(container), container, merge=merge
                )
        await self._apply(merge)

    async def remove_container(self, container: Container) -> None:
        """Send RemoveContainer, once per container, after `stop_container`."""
        await self.stop_container(container)
        async with self._lock:
            self._containers_being_created.pop(container.id, None)
            if self._states.pop(container.id, None) is not None:
                await self._announce(api.REMOVE_CONTAINER, self._sandbox(container), container)

    def container_ended(self, container: Container) -> None:
        """Run `stop_container` in a task, for a caller that cannot wait."""
        task = asyncio.get_running_loop().create_task(self._stop_and_log(container))
        # The event loop has only weak references to tasks (asyncio.create_task).
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _stop_and_log(self, container: Container) -> None:
        try:
            await self.stop_container(container)
        except Exception:
            log.exception(
                "NRI: cannot report the exit of container %s: unexpected error", container.id
            )

    # -- helpers

    def _sandbox(self, container: Container) -> Sandbox | None:
        return self._services.index.sandboxes.find(container.sandbox_id)

    async def _request(
        self, event: int, sandbox: Sandbox | None, container: Container | None
    ) -> Any:
        """Build the request message for `event` with the pod, or with the container and its pod's
        id. Return an empty message when no plugin is connected."""
        request = getattr(api, f"{METHODS[event]}Request")()  # type: ignore[index]
        # The conversion reads the container's files, so it is left out when no plugin needs it.
        if self._plugins and sandbox is not None:
            request.pod.CopyFrom(convert.pod(sandbox))
        if self._plugins and container is not None:
            request.pod.id = container.sandbox_id
            spec = await self._spec(container)
            request.container.CopyFrom(convert.container(container, spec))
        return request

    async def _announce(
        self,
        event: int,
        sandbox: Sandbox | None,
        container: Container | None = None,
        *,
        may_refuse: bool = False,
        merge: Merge | None = None,
    ) -> None:
        """Build the request message for an event of the pod, or of a container in it, and send it
        to all plugins. With `may_refuse` raise a plugin's error instead of logging it. `merge`:
        merges the plugins' responses."""
        request = await self._request(event, sandbox, container)
        await self._notify(event, request, may_refuse=may_refuse, merge=merge)

    async def _notify(
        self, event: int, request: Any, *, may_refuse: bool = True, merge: Merge | None = None
    ) -> None:
        """Send a request to all plugins. `may_refuse`: a plugin's error refuses the operation and
        is raised; else it is logged. `merge`: collects the responses."""
        for plugin in list(self._plugins):
            try:
                response = await plugin.request(event, request)
                if merge is not None and response is not None:
                    merge.add(plugin.name, response)
            except Error as error:
                if may_refuse:
                    raise
                log.warning("%s", error)

    async def _on_unsolicited_update(
        self, plugin: Plugin, request: api.UpdateContainersRequest
    ) -> Sequence[api.ContainerUpdate]:
        merge = Merge()
        merge.add(plugin.name, request)
        return await self._apply(merge)

    async def _apply(self, merge: Merge) -> list[api.ContainerUpdate]:
        """Perform the evictions and updates that plugins have requested. Skip containers that no
        longer exist. Return the failed updates, without those that plugins marked
        `ignore_failure`."""
        containers = self._services.index.containers
        for eviction in merge.evictions:
            container = containers.find(eviction.container_id)
            if container is not None:
                log.info(
                    "container %s is evicted by an NRI plugin: %s", container.id, eviction.reason
                )
                try:
                    await stop.kill(self._services, container)
                except Error as error:
                    log.warning(
                        "container %s, evicted by an NRI plugin, cannot be killed: %s",
                        container.id,
                        error,
                    )
        failed = []
        for change in merge.updates.values():
            container = containers.find(change.container_id)
            if container is None:
                continue
            try:
                await update.apply(
                    self._services, container, convert.to_cri(change.linux.resources)
                )
            except Error as error:
                if not change.ignore_failure:
                    log.warning(
                        "container %s: the update by an NRI plugin failed: %s", container.id, error
                    )
                    failed.append(change)
        return failed
