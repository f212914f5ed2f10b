"""The server's side of the compilers, which stay warm (`zygote.workers`). asyncio, no threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pyrunc import ipc
from pyrunc.compiler.messages import CompileContainer, CompileExec, CompilePause
from pyrunc.errors import ResourceExhausted
from pyrunc.plan.bind_source import BindSource
from pyrunc.records import Request
from pyrunc.zygote.workers import Errands, Workers

MOST_FDS = ipc.MOST_FDS - 1
"""One is left for a message that travels in a memfd."""
SERVE = "pyrunc.compiler.service:serve"
KEPT = max(2, min(os.cpu_count() or 1, 8))
"""So many are at work at a time, and stay: they use the processor, and a fresh one is slow."""

_NOTHING: Mapping[str, int] = {}
_NO_SOURCES: Mapping[str, BindSource] = {}


class CompiledLaunch:
    """A launch that waits for its shim: a compiler's answer (`compiler.messages`), and descriptors that it owns until `close`.

    `parts`: where the compiler's time went (`pyrunc.parts`).
    """

    __slots__ = ("compiled", "fds", "parts")

    def __init__(self, compiled: ipc.Message, fds: Sequence[int] = ()) -> None:
        self.compiled, self.fds = {name: compiled[name] for name in compiled if name != "parts"}, list(fds)
        self.parts: Sequence[Sequence[Any]] = compiled.get("parts", ())

    def close(self) -> None:
        """Close the descriptors; fine when they are closed. A cgroup that was made stays."""
        ipc.close_all(self.fds)
        self.fds = []

    def __enter__(self) -> CompiledLaunch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Compilers:
    """The compilers of one server. Use from one event loop."""

    def __init__(self, errands: Errands, *, timed: bool = False) -> None:
        """`errands`: a zygote that was started with `pyrunc.compiler.service` preloaded. `timed`: launches tell the shim when each
        operation was done, which makes them slower."""
        self.timed = timed
        self._workers = Workers(errands, SERVE, "a compiler", KEPT, KEPT)

    def warm(self) -> None:
        """Have them ready before they are asked."""
        self._workers.warm(KEPT)

    def close(self) -> None:
        """Hang up; they end by themselves."""
        self._workers.close()

    async def container(
        self,
        container: str,
        directory: str,
        timeout_s: float,
        images: Mapping[str, int] = _NOTHING,
        sources: Mapping[str, BindSource] = _NO_SOURCES,
        source_fds: Mapping[str, int] = _NOTHING,
    ) -> CompiledLaunch:
        """The launch of the container whose configuration is in `directory`; its cgroup exists from here on. `images`: mounts of
        images by the paths of their indexes; `sources`, `source_fds`: see `compile.container.CreateRequest`. The descriptors stay
        the caller's. Raises Error, ResourceExhausted for more of them than fit a message."""
        fds = [*images.values(), *source_fds.values()]
        if len(fds) > MOST_FDS:
            raise ResourceExhausted(
                f"{len(fds)} images and sources of mounts to open for the container, of which {MOST_FDS} fit a message"
            )
        request = CompileContainer(
            container, directory, list(images), self.timed, dict(sources), list(source_fds)
        )
        return await self._ask(request, timeout_s, fds)

    async def pause(self, sandbox_dir: str, timeout_s: float) -> CompiledLaunch:
        """The launch of the pause process that `sandbox_dir` describes; its cgroup exists from here on. Raises Error."""
        return await self._ask(CompilePause(sandbox_dir, self.timed), timeout_s)

    async def exec(
        self, directory: str, pid: int, process: Mapping[str, Any], timeout_s: float, *, tty: bool = False
    ) -> CompiledLaunch:
        """The launch of an OCI process object in the container whose first process is `pid`. Raises Error."""
        wanted = CompileExec(directory, pid, dict(process), tty, self.timed)
        return await self._ask(wanted, timeout_s)

    async def _ask(self, question: Request, timeout_s: float, fds: Sequence[int] = ()) -> CompiledLaunch:
        return CompiledLaunch(*await self._workers.ask(question, timeout_s, fds))
