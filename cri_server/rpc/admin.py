"""A service of our own beside CRI, for our own command line: what CRI has no call for."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from cri_server import debug
from cri_server.containers import pause
from cri_server.rpc import private
from cri_server.rpc.methods import Method, Table
from cri_server.services import Services
from cri_server.status.paused import is_paused
from cri_server.timeline.choose import choose
from pyrunc.errors import InvalidArgument, WrongState


class Admin:
    """The calls."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._profiling = False

    async def load_image(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"path": absolute, "name": reference or missing} -> {"images": [{"id", "repo_tags"}]}."""
        path, name = request.get("path"), request.get("name")
        if not isinstance(path, str) or not path.startswith("/"):
            raise InvalidArgument("path must be an absolute path")
        if name is not None and not isinstance(name, str):
            raise InvalidArgument("name must be a string")
        images = await self._services.images.load(Path(path), name)
        return {"images": [{"id": i.id, "repo_tags": i.repo_tags} for i in images]}

    def container_config(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"id"} -> {"container", "sandbox"}: what CreateContainer was given, with its environment, as base64 of the messages."""
        container = self._services.index.containers.get(str(request.get("id", "")))
        sandbox = self._services.index.sandboxes.get(container.sandbox_id)
        found = {"container": container.config, "sandbox": sandbox.config}
        return {name: base64.b64encode(each.SerializeToString()).decode() for name, each in found.items()}

    async def pause_container(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"id"} -> {}. Raises NotFound, WrongState, DeadlineExceeded, KernelError."""
        await pause.pause(self._services, str(request.get("id", "")))
        return {}

    async def unpause_container(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"id"} -> {}. Raises NotFound, WrongState, KernelError."""
        await pause.unpause(self._services, str(request.get("id", "")))
        return {}

    def paused_containers(self, request: dict[str, Any]) -> dict[str, Any]:
        """{} -> {"ids"} of those that are paused."""
        return {"ids": [c.id for c in self._services.index.select_containers() if is_paused(c)]}

    async def timeline(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"pod": reference or "", "last", "slowest": numbers or 0} -> {"calls": [see `timeline.ring.Entry`]}."""
        pod, numbers = request.get("pod", ""), [request.get(key, 0) for key in ("last", "slowest")]
        if not isinstance(pod, str) or not all(type(n) is int and n >= 0 for n in numbers):
            raise InvalidArgument("pod must be a string, last and slowest numbers")
        entries = await asyncio.to_thread(self._services.timeline.read)
        return {"calls": choose(entries, pod, *numbers)}

    async def follow_timeline(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """{"pod": reference or "", "after_ns": number} -> an entry for each call that has ended since, and that ends from now on."""
        pod, after_ns = request.get("pod", ""), request.get("after_ns", 0)
        if not isinstance(pod, str) or type(after_ns) is not int:
            raise InvalidArgument("pod must be a string, after_ns a number")
        async for entry in self._services.timeline.follow(after_ns):
            if choose([entry], pod):
                yield entry

    async def collect_garbage(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"dry_run", "images": booleans} -> {"items": [{"kind", "name", "action", "why", "size_bytes"}]}."""
        from cri_server import garbage  # which is seldom asked for

        asked = {key: request.get(key) for key in ("dry_run", "images")}
        for key, value in asked.items():
            if not isinstance(value, bool):
                raise InvalidArgument(f"{key} must be true or false")
        work = garbage.collect(self._services, dry_run=bool(asked["dry_run"]), images=bool(asked["images"]))
        return {"items": [item.to_json() for item in await work]}

    async def debug_stacks(self, request: dict[str, Any]) -> dict[str, Any]:
        """{} -> {"text"}: what all threads and tasks are at."""
        return {"text": debug.stacks()}

    async def debug_profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"seconds"} -> {"stacks": lines for a flame graph}. Raises InvalidArgument, WrongState (one at a time)."""
        seconds = request.get("seconds")
        if not isinstance(seconds, int | float) or not 0 < seconds <= debug.PROFILE_LIMIT_S:
            raise InvalidArgument(f"seconds must be a number up to {debug.PROFILE_LIMIT_S:g}")
        if self._profiling:
            raise WrongState("the server is being profiled already")
        self._profiling = True
        try:
            return {"stacks": await asyncio.to_thread(debug.profile, seconds)}
        finally:
            self._profiling = False

    def table(self) -> Table:
        """What the gRPC server takes."""
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            private.LOAD_IMAGE: self.load_image,
            private.CONTAINER_CONFIG: self.container_config,
            private.PAUSE_CONTAINER: self.pause_container,
            private.UNPAUSE_CONTAINER: self.unpause_container,
            private.PAUSED_CONTAINERS: self.paused_containers,
            private.TIMELINE: self.timeline,
            private.FOLLOW_TIMELINE: self.follow_timeline,
            private.COLLECT_GARBAGE: self.collect_garbage,
            private.DEBUG_STACKS: self.debug_stacks,
            private.DEBUG_PROFILE: self.debug_profile,
        }
        return {
            private.path(name).encode(): Method(name, private.decode, call, private.encode)
            for name, call in calls.items()
        }
