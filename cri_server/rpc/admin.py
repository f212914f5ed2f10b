"""A service of our own beside CRI, for our own command line: what CRI has no call for."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.containers import pause, sessions
from cri_server.observability import debug
from cri_server.observability.timeline.choose import choose
from cri_server.observability.timeline.ring import Entry
from cri_server.rpc import private
from cri_server.rpc.methods import Method, Table
from cri_server.sandboxes import stop
from cri_server.services import Services
from cri_server.status.paused import is_paused
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.records import Request


class Admin:
    """The calls."""

    def __init__(self, services: Services, streaming: StreamingServer) -> None:
        self._services, self._streaming = services, streaming
        self._profiling = False

    async def load_image(self, asked: private.LoadImage) -> private.Images:
        images = await self._services.images.load(Path(asked.path), asked.name)
        return private.Images([private.LoadedImage(i.id, list(i.repo_tags)) for i in images])

    def container_config(self, asked: private.ContainerConfig) -> private.Configs:
        container = self._services.index.containers.get(asked.id)
        sandbox = self._services.index.sandboxes.get(container.sandbox_id)
        texts = [
            base64.b64encode(c.SerializeToString()).decode()
            for c in (container.config, sandbox.config)
        ]
        return private.Configs(*texts)

    def pod_config(self, asked: private.PodConfig) -> private.SandboxConfig:
        sandbox = self._services.index.sandboxes.get(asked.id)
        return private.SandboxConfig(base64.b64encode(sandbox.config.SerializeToString()).decode())

    def exec_as(self, asked: private.ExecAs) -> private.Session:
        """Raises InvalidArgument, NotFound, WrongState."""
        request = api.ExecRequest(
            container_id=asked.id,
            cmd=asked.command,
            stdin=asked.stdin,
            stdout=True,
            stderr=not asked.tty,
            tty=asked.tty,
        )
        changes = {"user": asked.user, "cwd": asked.cwd, "env": list(asked.env)}
        changes = {name: value for name, value in changes.items() if value}
        options = sessions.check_exec(self._services, request, changes)
        return private.Session(self._streaming.url_for_exec(options))

    async def pause_container(self, asked: private.PauseContainer) -> private.Done:
        """Raises NotFound, WrongState, DeadlineExceeded, KernelError."""
        await pause.pause(self._services, asked.id)
        return private.Done()

    async def unpause_container(self, asked: private.UnpauseContainer) -> private.Done:
        """Raises NotFound, WrongState, KernelError."""
        await pause.unpause(self._services, asked.id)
        return private.Done()

    def paused_containers(self, asked: private.PausedContainers) -> private.Ids:
        return private.Ids([c.id for c in self._services.index.select_containers() if is_paused(c)])

    async def timeline(self, asked: private.Timeline) -> private.Calls:
        if asked.last < 0 or asked.slowest < 0:
            raise InvalidArgument("last and slowest must be numbers from 0 on")
        entries = await asyncio.to_thread(self._services.timeline.read)
        return private.Calls(choose(entries, asked.pod, asked.last, asked.slowest))

    async def follow_timeline(self, asked: private.FollowTimeline) -> AsyncGenerator[Entry, None]:
        async for entry in self._services.timeline.follow(asked.after_ns):
            if choose([entry], asked.pod):
                yield entry

    async def release_network(self, asked: private.ReleaseNetwork) -> private.Refusals:
        """Raises NotFound, WrongState."""
        return private.Refusals(await stop.release_network(self._services, asked.id))

    async def collect_garbage(self, asked: private.CollectGarbage) -> private.Items:
        from cri_server.store import garbage  # which is seldom asked for

        work = garbage.collect(
            self._services, dry_run=asked.dry_run, images=asked.images, force=asked.force
        )
        return private.Items(
            [
                private.Item(item.kind, item.name, item.action, item.why, item.size_bytes)
                for item in await work
            ]
        )

    async def debug_stacks(self, asked: private.DebugStacks) -> private.Text:
        return private.Text(debug.stacks())

    async def debug_profile(self, asked: private.DebugProfile) -> private.Stacks:
        """Raises InvalidArgument, WrongState (one at a time)."""
        if not 0 < asked.seconds <= debug.PROFILE_LIMIT_S:
            raise InvalidArgument(f"seconds must be a number up to {debug.PROFILE_LIMIT_S:g}")
        if self._profiling:
            raise WrongState("the server is being profiled already")
        self._profiling = True
        try:
            return private.Stacks(await asyncio.to_thread(debug.profile, asked.seconds))
        finally:
            self._profiling = False

    def table(self) -> Table:
        """What the gRPC server takes."""
        calls: list[tuple[type[Request], Callable[[Any], Any], Callable[[Any], bytes]]] = [
            (private.LoadImage, self.load_image, private.encode_record),
            (private.ContainerConfig, self.container_config, private.encode_record),
            (private.PodConfig, self.pod_config, private.encode_record),
            (private.ExecAs, self.exec_as, private.encode_record),
            (private.PauseContainer, self.pause_container, private.encode_record),
            (private.UnpauseContainer, self.unpause_container, private.encode_record),
            (private.PausedContainers, self.paused_containers, private.encode_record),
            (private.Timeline, self.timeline, private.encode_record),
            (private.FollowTimeline, self.follow_timeline, private.encode),
            (private.ReleaseNetwork, self.release_network, private.encode_record),
            (private.CollectGarbage, self.collect_garbage, private.encode_record),
            (private.DebugStacks, self.debug_stacks, private.encode_record),
            (private.DebugProfile, self.debug_profile, private.encode_record),
        ]
        return {
            private.path(kind.call).encode(): Method(
                kind.call, private.decoder(kind), answer, encode
            )
            for kind, answer, encode in calls
        }
