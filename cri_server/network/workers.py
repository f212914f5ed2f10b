"""Forks of the zygote that stay and run our plugins, request after request; a few idle ones are kept.

A worker serves one request at a time. One that misses its deadline, dies or is cancelled is killed, never asked again;
the next request finds another idle one or has one forked.

Few are at work at a time, the other requests wait: the kernel changes links under one lock, so that more workers only fork,
queue for that lock and push each other off the processors. A few that take long, since they wait for something else (another
host's address plugin), do not count. Measured on two processors, attaching and detaching pods all at once: 30 pods
667 + 242 ms with a worker for each request, 92 + 34 ms with four, 125 + 57 ms with one; 10 pods 64 + 65, 31 + 12, 41 + 18 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from cri_server.network.model import ErrandOutcome, Errands
from pyrunc import ipc
from pyrunc.errors import DeadlineExceeded, Error, PeerError, Unavailable
from pyrunc.peer import Peer

_FUNCTION = "cni_plugins.errand:serve"
_MOST_AT_WORK = 4
_MOST_IDLE = 4
_MOST_LONG = 4
_LONG_S = 1.0
_MOST_REQUESTS = 1000


class Workers:
    """The workers of one server. Use from one event loop."""

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self._idle: list[_Worker] = []
        self._places = asyncio.Semaphore(_MOST_AT_WORK)
        self._long = 0
        self._ending: set[asyncio.Task[ErrandOutcome]] = set()

    def close(self) -> None:
        """Hang up; idle workers end by themselves."""
        while self._idle:
            self._retire(self._idle.pop())

    async def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to `request`. Raises DeadlineExceeded, PeerError when the worker dies before it answers.

        `timeout_s` includes the wait for a turn.
        """
        try:
            async with asyncio.timeout(timeout_s), self._turn():
                return await self._ask(request)
        except TimeoutError:
            raise DeadlineExceeded(f"the CNI plugins took longer than {timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Be one of those at work; after `_LONG_S` one of those that take long, if there are not too many: then the next
        one gets the place.
        """
        await self._places.acquire()
        long = False

        def move() -> None:
            nonlocal long
            if self._long < _MOST_LONG:
                self._long += 1
                long = True
                self._places.release()

        clock = asyncio.get_running_loop().call_later(_LONG_S, move)
        try:
            yield
        finally:
            clock.cancel()
            if long:
                self._long -= 1
            else:
                self._places.release()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._take()
        try:
            answer = await worker.ask(request)
        except BaseException:
            self._retire(worker, kill=True)
            raise
        if worker.requests < _MOST_REQUESTS and len(self._idle) < _MOST_IDLE:
            self._idle.append(worker)
        else:
            self._retire(worker)
        return answer

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._retire(worker)
        return _Worker.start(self._errands)

    def _retire(self, worker: _Worker, *, kill: bool = False) -> None:
        """Its end is awaited in the background: nobody needs to."""
        worker.hang_up()
        if kill:
            worker.ending.cancel()
        self._ending.add(worker.ending)
        worker.ending.add_done_callback(self._ending.discard)


class _Worker:
    """One worker. `ending` is the errand that it runs in."""

    def __init__(self, ours: socket.socket, ending: asyncio.Task[ErrandOutcome]) -> None:
        self._peer, self.ending = Peer(ours, "the CNI worker", lambda message: None), ending
        self.requests = 0

    @classmethod
    def start(cls, errands: Errands) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ending = asyncio.create_task(_run(errands, theirs))
        ending.add_done_callback(_seen)
        return cls(ours, ending)

    @property
    def alive(self) -> bool:
        return not self.ending.done() and not self._peer.lost

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1
        try:
            answer, fds = await self._peer.ask(request)[1]
        except Unavailable:
            raise PeerError(f"a CNI worker ended before it answered{await self._last_words()}") from None
        ipc.close_all(fds)
        return answer

    async def _last_words(self) -> str:
        try:
            outcome = await self.ending
        except Error as error:
            return f": {error.message}"
        words = " ".join(outcome.stderr.decode("utf-8", "replace").split())
        return f" ({outcome.exit_code})" + (f": {words[-500:]}" if words else "")

    def hang_up(self) -> None:
        self._peer.close("the CNI worker was hung up on")


def _seen(task: asyncio.Task[ErrandOutcome]) -> None:
    """A worker that died while idle, with its zygote, is nobody's error."""
    if not task.cancelled():
        task.exception()


async def _run(errands: Errands, theirs: socket.socket) -> ErrandOutcome:
    """The errand's whole life. Our copy of its socket is closed with it, which is the end of file for who waits."""
    with theirs:
        return await errands.run(_FUNCTION, {}, (theirs.fileno(),))
