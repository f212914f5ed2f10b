"""Keeps worker processes: forks of the zygote, each of which answers one request at a time. A few
idle workers stay for the next requests. For asyncio, without threads.

A worker is killed when it misses its deadline or its caller is cancelled; the next request gets
another idle worker or a new one. Only a few workers are busy at a time, because more would compete
for processors and the kernel's locks; further requests wait. Up to `LONG_LIMIT` requests that take
longer than `LONG_S` do not count as busy, because they wait for slow storage or another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from cri_server.zygote.client import JobResult, Zygote
from cri_server.zygote.peer import Answer, Peer, wait_answer
from pyrunc.errors import DeadlineExceeded, Error, PeerError, Unavailable
from pyrunc.kernel.fd import close_all
from pyrunc.records import Request
from pyrunc.zygote.messages import FromWorker

LONG_S = 1.0
LONG_LIMIT = 4
REQUESTS_LIMIT = 1000  # after so many a worker ends, which frees the memory that it has leaked
KILL_WAIT_S = 2.0  # a killed process that waits for a disk may not end


class Workers:
    """The worker processes that run one function. Use from one event loop."""

    def __init__(self, zygote: Zygote, function: str, name: str, limit: int) -> None:
        """Start no worker yet: workers are started on demand. A worker calls `function(arguments,
        [socket])`, which answers requests until the socket closes. `name`: for error messages.
        `limit`: at most this number of workers are busy at once, and as many idle ones stay."""
        self._zygote = zygote
        # A replaced zygote ends only after its jobs, which include idle workers.
        zygote.on_renewed.append(self.close)
        self._function = function
        self._name = name
        self._limit = limit
        self._idle: list[_Worker] = []
        self._places = asyncio.Semaphore(limit)
        self._long = 0
        self._ending: set[asyncio.Task[JobResult]] = set()

    def close(self) -> None:
        """Close the connections of idle workers, which end by themselves."""
        while self._idle:
            self._retire(self._idle.pop())

    async def ask(self, request: Request, timeout_s: float, fds: Sequence[int] = ()) -> Answer:
        """Send `request` with `fds` to a worker and return its answer. The caller closes `fds`
        after the answer. `timeout_s` includes the wait for a worker.

        Raises DeadlineExceeded, the error that the worker answers, and Unavailable when the worker
        dies before it answers.
        """
        try:
            async with asyncio.timeout(timeout_s), self._turn():
                return await self._ask(request, fds)
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name} took longer than {timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until fewer than `limit` requests count as running. The `with` block then counts as
        a running request. After `LONG_S` it no longer counts, unless `LONG_LIMIT` other requests
        already run longer than `LONG_S`."""
        await self._places.acquire()
        long = False

        def move() -> None:
            nonlocal long
            if self._long < LONG_LIMIT:
                self._long += 1
                long = True
                self._places.release()

        clock = asyncio.get_running_loop().call_later(LONG_S, move)
        try:
            yield
        finally:
            clock.cancel()
            if long:
                self._long -= 1
            else:
                self._places.release()

    async def _ask(self, request: Request, fds: Sequence[int]) -> Answer:
        worker = self._take()
        try:
            answer = await worker.ask(request, fds)
        except asyncio.CancelledError:
            await worker.kill()
            raise
        except Error:
            self._put_back(worker)
            raise
        fields, received = answer
        try:
            last = FromWorker.of(fields, PeerError).last
        except PeerError:
            close_all(received)
            self._put_back(worker, last=True)
            raise
        self._put_back(worker, last=last)
        return answer

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._retire(worker)
        return _Worker(self._zygote, self._function, self._name)

    def _put_back(self, worker: _Worker, *, last: bool = False) -> None:
        if worker.zygote_pid is None:
            worker.zygote_pid = self._zygote.pid
        if (
            not last
            and worker.alive
            and worker.zygote_pid == self._zygote.pid
            and worker.requests < REQUESTS_LIMIT
            and len(self._idle) < self._limit
        ):
            self._idle.append(worker)
        else:
            self._retire(worker)

    def _retire(self, worker: _Worker) -> None:
        """Close the worker's connection. A background task waits until the worker process has
        ended."""
        worker.hang_up()
        self._ending.add(worker.ending)
        worker.ending.add_done_callback(self._ending.discard)


class _Worker:
    """A worker process and the connection to it. `ending`: a task that waits for the end of the
    process; `zygote_pid`: the pid of the zygote that forked it, None before the first answer."""

    def __init__(self, zygote: Zygote, function: str, name: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.requests = 0
        self.zygote_pid: int | None = None
        self._name, self._gone = name, asyncio.Event()
        self._peer = Peer(ours, name, lambda message: None, self._gone.set)
        self.ending = asyncio.get_running_loop().create_task(_run(zygote, function, theirs))
        self.ending.add_done_callback(_ignore_error)

    @property
    def alive(self) -> bool:
        return not self._peer.lost and not self.ending.done()

    async def ask(self, request: Request, fds: Sequence[int]) -> Answer:
        self.requests += 1
        _, answer = self._peer.ask(request.to_message(), fds)
        try:
            return await wait_answer(answer)
        except Unavailable:
            if self.alive:
                raise  # the worker has answered Unavailable
            raise Unavailable(
                f"{self._name} ended before it answered{await self._describe_end()}"
            ) from None

    async def kill(self) -> None:
        """Kill the worker in the middle of a request. Returns after its end, or after `KILL_WAIT_S`
        if it cannot be killed."""
        self.ending.cancel()
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self._gone.wait()
        except TimeoutError:
            pass
        self.hang_up()

    def hang_up(self) -> None:
        self._peer.close(f"the connection to {self._name} was closed")

    async def _describe_end(self) -> str:
        try:
            outcome = await self.ending
        except Error as error:
            return f": {error.message}"
        words = " ".join(outcome.stderr.decode("utf-8", "replace").split())
        return f" ({outcome.exit_code})" + (f": {words[-500:]}" if words else "")


def _ignore_error(task: asyncio.Task[JobResult]) -> None:
    """Ignore the error of an idle worker that died with its zygote."""
    if not task.cancelled():
        task.exception()


async def _run(zygote: Zygote, function: str, theirs: socket.socket) -> JobResult:
    """Run the worker's job until it ends, then close the server's copy of the worker's socket, so
    that the connection reads end of file."""
    with theirs:
        return await zygote.run(function, None, (theirs.fileno(),))
