"""The server's side of the compilers: a few stay, each asked one thing at a time. asyncio, no threads.

One that misses its deadline (a source on storage that does not answer), dies or is cancelled is killed and never asked again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pyrunc import ipc
from pyrunc.compiler.service import SERVE
from pyrunc.errors import DeadlineExceeded, Error, Unavailable
from pyrunc.peer import Peer
from pyrunc.zygote.client import ErrandResult, Zygote

MOST_AT_WORK = 4
MOST_IDLE = 2
KILLED_S = 2.0  # a process that waits for a disk may take for ever


class CompiledLaunch:
    """A launch that waits for its shim: the fields of a compiler's answer, and descriptors that it owns until `close`."""

    __slots__ = ("fds", "fields")

    def __init__(self, fields: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        self.fields, self.fds = fields, list(fds)

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

    def __init__(self, zygote: Zygote) -> None:
        """`zygote` must have been started with `pyrunc.compiler.service` preloaded."""
        self._zygote = zygote
        self._idle: list[_Compiler] = []
        self._places = asyncio.Semaphore(MOST_AT_WORK)
        self._ending: set[asyncio.Task[ErrandResult]] = set()

    def warm(self) -> None:
        """Have one ready before it is asked."""
        self._idle.append(_Compiler(self._zygote))

    def close(self) -> None:
        """Hang up; they end by themselves."""
        while self._idle:
            self._retire(self._idle.pop())

    async def container(self, container: str, directory: str, timeout_s: float) -> CompiledLaunch:
        """The launch of the container whose configuration is in `directory`; its cgroup exists from here on. Raises Error."""
        return await self._ask(
            {"call": "container", "container": container, "directory": directory}, timeout_s
        )

    async def pause(self, sandbox_dir: str, timeout_s: float) -> CompiledLaunch:
        """The launch of the pause process that `sandbox_dir` describes; its cgroup exists from here on. Raises Error."""
        return await self._ask({"call": "pause", "sandbox_dir": sandbox_dir}, timeout_s)

    async def exec(
        self, directory: str, pid: int, process: Mapping[str, Any], timeout_s: float, *, tty: bool = False
    ) -> CompiledLaunch:
        """The launch of an OCI process object in the container whose first process is `pid`. Raises Error."""
        wanted = {"call": "exec", "directory": directory, "pid": pid, "process": dict(process), "tty": tty}
        return await self._ask(wanted, timeout_s)

    async def _ask(self, question: Mapping[str, Any], timeout_s: float) -> CompiledLaunch:
        try:
            async with asyncio.timeout(timeout_s), self._places:
                return await self._ask_one(question)
        except TimeoutError:
            raise DeadlineExceeded(f"compiling a launch took longer than {timeout_s:g} s") from None

    async def _ask_one(self, question: Mapping[str, Any]) -> CompiledLaunch:
        compiler = self._take()
        try:
            launch = await compiler.ask(question)
        except asyncio.CancelledError:
            await compiler.kill()
            raise
        except Unavailable:
            self._retire(compiler)
            raise
        except Error:
            self._put_back(compiler)
            raise
        self._put_back(compiler)
        return launch

    def _take(self) -> _Compiler:
        while self._idle:
            compiler = self._idle.pop()
            if compiler.alive:
                return compiler
            self._retire(compiler)
        return _Compiler(self._zygote)

    def _put_back(self, compiler: _Compiler) -> None:
        if compiler.alive and len(self._idle) < MOST_IDLE:
            self._idle.append(compiler)
        else:
            self._retire(compiler)

    def _retire(self, compiler: _Compiler) -> None:
        """Its end is awaited in the background: nobody needs to."""
        compiler.hang_up()
        self._ending.add(compiler.ending)
        compiler.ending.add_done_callback(self._ending.discard)


class _Compiler:
    """One compiler. `ending` is the errand that it runs in."""

    def __init__(self, zygote: Zygote) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._gone = asyncio.Event()
        self._peer = Peer(ours, "the compiler", lambda message: None, self._gone.set)
        self.ending = asyncio.get_running_loop().create_task(_run(zygote, theirs))
        self.ending.add_done_callback(self._ended)

    @property
    def alive(self) -> bool:
        return not self._peer.lost and not self.ending.done()

    async def ask(self, question: Mapping[str, Any]) -> CompiledLaunch:
        _, answer = self._peer.ask(question)
        return CompiledLaunch(*await answer)

    async def kill(self) -> None:
        """End it in the middle of its work. When this returns it makes nothing any more, unless it cannot be killed."""
        self.ending.cancel()
        try:
            await asyncio.wait_for(self._gone.wait(), KILLED_S)
        except TimeoutError:
            pass
        self.hang_up()

    def hang_up(self) -> None:
        self._peer.close("the compiler was closed")

    def _ended(self, task: asyncio.Task[ErrandResult]) -> None:
        if task.cancelled():
            return  # it is being killed: the end of its socket tells when
        task.exception()  # one that died while idle, with its zygote, is nobody's error
        self._peer.close("the compiler is gone")


async def _run(zygote: Zygote, theirs: socket.socket) -> ErrandResult:
    """The errand's whole life. Our copy of its socket is closed with it."""
    with theirs:
        return await zygote.run(SERVE, {}, (theirs.fileno(),))
