"""The handlers of `pyrunc.v1.Admin` about containers, pods and the server itself. The command line
calls them for what CRI lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.containers import pause, sessions
from cri_server.observability import debug
from cri_server.observability.timeline.choose import choose
from cri_server.observability.timeline.ring import Entry
from cri_server.rpc import methods, private
from cri_server.sandboxes import stop
from cri_server.services import Services
from cri_server.status.paused import is_paused
from cri_server.store.model import pack
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import InvalidArgument, WrongState


class Admin:
    """The handlers of the calls of `pyrunc.v1.Admin` about pods, containers and the server."""

    def __init__(self, services: Services, streaming: StreamingServer) -> None:
        self._services, self._streaming = services, streaming
        self._profiling = False

    async def load_image(self, request: private.LoadImage) -> private.LoadedImages:
        images = await self._services.images.load(Path(request.path), request.name)
        return private.LoadedImages([private.LoadedImage(i.id, list(i.repo_tags)) for i in images])

    def container_config(self, request: private.ContainerConfig) -> private.ContainerConfigs:
        container = self._services.index.containers.get(request.id)
        sandbox = self._services.index.sandboxes.get(container.sandbox_id)
        return private.ContainerConfigs(pack(container.config), pack(sandbox.config))

    def pod_config(self, request: private.PodConfig) -> private.SandboxConfig:
        sandbox = self._services.index.sandboxes.get(request.id)
        return private.SandboxConfig(pack(sandbox.config))

    def exec_as(self, request: private.ExecAs) -> private.SessionUrl:
        """Return the URL of an exec with the requested user, working directory and environment.
        Raises NotFound, InvalidArgument for an empty command, WrongState if the container is paused
        or does not run, ResourceExhausted when too many URLs are unused."""
        exec_request = api.ExecRequest(
            container_id=request.id,
            cmd=request.command,
            stdin=request.stdin,
            stdout=True,
            stderr=not request.tty,
            tty=request.tty,
        )
        changes = {"user": request.user, "cwd": request.cwd, "env": list(request.env)}
        changes = {name: value for name, value in changes.items() if value}
        options = sessions.check_exec(self._services, exec_request, changes)
        return private.SessionUrl(self._streaming.url_for(options))

    async def pause_container(self, request: private.PauseContainer) -> None:
        """Freeze the container. Raises NotFound, KernelError, WrongState if the container is paused
        already or does not run, and DeadlineExceeded when it does not freeze in time."""
        await pause.pause(self._services, request.id)

    async def unpause_container(self, request: private.UnpauseContainer) -> None:
        """Thaw the container. Raises NotFound, KernelError, and WrongState if it is not paused."""
        await pause.unpause(self._services, request.id)

    def paused_containers(self, request: private.PausedContainers) -> private.ContainerIds:
        return private.ContainerIds(
            [c.id for c in self._services.index.select_containers() if is_paused(c)]
        )

    async def timeline(self, request: private.Timeline) -> private.Calls:
        if request.last < 0 or request.slowest < 0:
            raise InvalidArgument("last and slowest must not be negative")
        entries = await asyncio.to_thread(self._services.timeline.read)
        return private.Calls(choose(entries, request.pod, request.last, request.slowest))

    async def follow_timeline(self, request: private.FollowTimeline) -> AsyncGenerator[Entry, None]:
        async for entry in self._services.timeline.follow(request.after_ns):
            if choose([entry], request.pod):
                yield entry

    async def release_network(self, request: private.ReleaseNetwork) -> private.Refusals:
        """Release the network of a stopped pod even if its CNI plugins fail, and return the errors
        of the plugins. Raises NotFound, and WrongState while the pod runs."""
        return private.Refusals(await stop.release_network(self._services, request.id))

    async def collect_garbage(self, request: private.CollectGarbage) -> private.GarbageItems:
        from cri_server.store import garbage  # imported late: it is used seldom

        items = await garbage.collect(
            self._services, dry_run=request.dry_run, images=request.images, force=request.force
        )
        return private.GarbageItems(items)

    async def debug_stacks(self, request: private.DebugStacks) -> private.StackText:
        return private.StackText(debug.stacks())

    async def debug_profile(self, request: private.DebugProfile) -> private.Stacks:
        """Sample the server's stacks for `request.seconds` and return them with counts. Raises
        InvalidArgument for a duration out of range, WrongState while another profile runs."""
        if not 0 < request.seconds <= debug.PROFILE_LIMIT_S:
            raise InvalidArgument(f"seconds must be a number up to {debug.PROFILE_LIMIT_S:g}")
        if self._profiling:
            raise WrongState("a profile is already running")
        self._profiling = True
        try:
            return private.Stacks(await asyncio.to_thread(debug.profile, request.seconds))
        finally:
            self._profiling = False

    def table(self) -> methods.Table:
        """Return the gRPC methods, by path, that call this object's handlers."""
        return methods.private_table(
            {
                private.LoadImage: self.load_image,
                private.ContainerConfig: self.container_config,
                private.PodConfig: self.pod_config,
                private.ExecAs: self.exec_as,
                private.PauseContainer: self.pause_container,
                private.UnpauseContainer: self.unpause_container,
                private.PausedContainers: self.paused_containers,
                private.Timeline: self.timeline,
                private.FollowTimeline: self.follow_timeline,
                private.ReleaseNetwork: self.release_network,
                private.CollectGarbage: self.collect_garbage,
                private.DebugStacks: self.debug_stacks,
                private.DebugProfile: self.debug_profile,
            }
        )
