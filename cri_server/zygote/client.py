"""The client of a zygote: spawns it, asks it for children, and replaces it when it has died. For
asyncio, without threads.

The server is never forked: posix_spawn starts the zygote without a copy of the server's memory.
Other children are forked from the zygote, which has imported only the modules that they need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cri_server.zygote.peer import Peer, fail, wait_fields
from pyrunc import ipc
from pyrunc.errors import DeadlineExceeded, Error, PeerError, Unavailable, error_of
from pyrunc.keeper.client import ensure
from pyrunc.kernel.fd import close_all, closing_fd
from pyrunc.kernel.process import send_signal
from pyrunc.records import Record
from pyrunc.zygote.messages import (
    UNANSWERED,
    Cancel,
    Fork,
    Forked,
    JobEnded,
    Outcome,
    RunJob,
    ZygoteReady,
)

log = logging.getLogger(__name__)

OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
_READ_BYTES = 64 * 1024
# On an overloaded machine imports take minutes, and would take as long again after a second start.
_START_TIMEOUT_S = 300.0
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2].split(':');"
    " from pyrunc.zygote.__main__ import main; main()"
)
_ZYGOTE_FD = 3
_DRAIN_INTERVAL_S = 0.5  # between two checks whether a replaced zygote has jobs
# With -S an editable install, which is an import hook of site-packages, would not be found.
_OUR_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True)
class JobResult:
    """The result of `Zygote.run`. `exit_code` is the job's exit code, or 128 + n if signal n ended
    it. The caller closes `fds`.

    `stdout` and `stderr` hold at most `output_limit_bytes` each; what the job wrote beyond that is
    dropped.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    fds: list[int] = field(default_factory=list)

    def require_success(self, job: str) -> None:
        """Raise PeerError unless the exit code is 0. The message has the exit code, the last line
        of stderr, and `job`, which names the job."""
        if self.exit_code:
            last_line = self.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise PeerError(f"{job} failed with exit code {self.exit_code}: {last_line[:300]}")


class Zygote:
    """A zygote process, replaced by a new one when it has died. Use from one event loop."""

    def __init__(self, preload: Sequence[str], keeper: str | None = None) -> None:
        """Prepare a zygote without starting it. `preload`: the modules that the zygote imports at
        its start. `keeper`: the folder of a `pyrunc-keeper` process.

        The zygote is a child of this keeper, which is started if it does not run. Without `keeper`,
        or if the keeper cannot be started, the zygote is a child of the server.
        """
        self._preload = list(preload)
        self.keeper = keeper
        self._process: _ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._draining: set[asyncio.Task[None]] = set()
        self.on_renewed: list[Callable[[], None]] = []  # called after `renew`
        self._first: asyncio.Task[_ZygoteProcess] | None = None

    def begin(self) -> None:
        """Spawn the zygote now, instead of at the first request. Requests wait until the zygote is
        ready. Call `begin` at most once."""
        self._first = asyncio.create_task(self._live())

    async def ready(self) -> None:
        """Wait until the zygote that `begin` has spawned has imported its modules. A zygote that
        dies meanwhile is replaced once. Raises PeerError if an import fails, Unavailable if the
        second zygote dies, too, DeadlineExceeded if the imports take too long."""
        assert self._first is not None
        try:
            await asyncio.shield(self._first)
        except Unavailable:
            await self._live()

    @property
    def pid(self) -> int | None:
        """Return the living zygote's pid; None when no zygote lives."""
        return self._process.pid if self._process and not self._process.peer.lost else None

    @property
    def lost(self) -> bool:
        """Return whether the zygote has died and was not replaced yet."""
        return self.pid is None and self._first is not None and self._first.done()

    async def fork(
        self, function: str, arguments: Record | None = None, fds: Sequence[int] = ()
    ) -> int:
        """Start a detached child that calls `function`, named as `module:function`, with the fields
        of `arguments` and with copies of `fds`. Return the child's pid.

        The child has its own session, /dev/null as stdio and only `fds` (renumbered from 3). It is
        not killed with the server or the zygote. The caller keeps its `fds`. Raises Unavailable
        when the zygote dies meanwhile.
        """
        process = await self._live()
        request = Fork(function, _fields(arguments))
        _, answering = process.peer.ask(request.to_message(), fds)
        return Forked.of(await wait_fields(answering), PeerError).pid

    async def run(
        self,
        function: str,
        arguments: Record | None = None,
        fds: Sequence[int] = (),
        timeout_s: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> JobResult:
        """Run `function`, named as `module:function`, in a child and wait for the child's end. The
        function gets the fields of `arguments` and copies of `fds`.

        The function returns None (exit code 0) or an exit code, or calls execve. `env` is added to
        the zygote's environment. If the function raises an `Error`, `run` raises it, too; any other
        exception becomes a traceback on stderr and exit code 1. Raises PeerError if the function
        returns descriptors.

        After `timeout_s`, the child and its descendants are killed and DeadlineExceeded is raised.
        They are also killed when the caller is cancelled. When the child ends, its descendants are
        killed.
        """
        request = RunJob(function, _fields(arguments), dict(env or {}), timeout_s)
        return await self._run(request, _JobPipes(output_limit_bytes, 0), fds, stdin)

    async def run_for_fd(
        self, function: str, arguments: Record | None = None, timeout_s: float | None = None
    ) -> JobResult:
        """Run `function` in a child as `run` does, but pass it no descriptors. The function may
        return a list of one descriptor; the result then has this descriptor in `fds`."""
        request = RunJob(function, _fields(arguments), {}, timeout_s)
        return await self._run(request, _JobPipes(OUTPUT_LIMIT_BYTES, 1), (), b"")

    async def _run(
        self, request: RunJob, job: _JobPipes, fds: Sequence[int], stdin: bytes
    ) -> JobResult:
        try:
            process = await self._live()
            with job.open_ends(stdin) as ends:
                number, answering = process.peer.ask(request.to_message(), [*ends, *fds])
            try:
                answer = await wait_fields(answering)
            except asyncio.CancelledError:
                process.peer.send({"id": UNANSWERED, **Cancel(number).to_message()})
                raise
            ended = JobEnded.of(answer, PeerError)
            if ended.timed_out:
                raise DeadlineExceeded(
                    f"{request.function} took longer than {request.timeout_s:g} s"
                )
            return job.result(ended.exit_code)
        finally:
            job.close()

    async def close(self) -> None:
        """End the zygote and kill its running jobs; detached children stay."""
        self._closed = True
        if self._first:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        if self._process:
            await self._process.close()
            self._process = None
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)

    async def _live(self) -> _ZygoteProcess:
        """Return the living zygote; start one if there is none. Raises Unavailable when closed."""
        async with self._starting:
            if self._closed:
                raise Unavailable("the zygote is closed")
            if self._process is None or self._process.peer.lost:
                old, self._process = self._process, None
                # Shielded: the dead zygote is reaped even if this caller is cancelled meanwhile.
                if old:
                    await asyncio.shield(old.close())
                self._process = await _ZygoteProcess.start(self._preload, self.keeper)
            return self._process

    async def renew(self) -> None:
        """Replace a living zygote with a new child of the keeper. The old zygote ends in the
        background, when its jobs have ended. Does nothing without a living zygote. Raises PeerError
        if the new zygote cannot import its modules, Unavailable if it dies, DeadlineExceeded if the
        imports take too long."""
        async with self._starting:
            old = self._process
            if self._closed or old is None or old.peer.lost:
                return
            self._process = await _ZygoteProcess.start(self._preload, self.keeper)
        for notify in self.on_renewed:
            notify()
        task = asyncio.create_task(_drain(old))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)


class _Spawned:
    """The process of a zygote. The server reaps it if `is_child`, else the keeper does. `_Spawned`
    closes `pidfd`."""

    def __init__(self, pid: int, pidfd: int, is_child: bool) -> None:
        self.pid, self.pidfd, self.is_child = pid, pidfd, is_child

    async def ended(self) -> None:
        """Wait until the process has ended; kill it if it has not ended within 5 s. Closes the
        pidfd."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        try:
            loop.add_reader(self.pidfd, ended.set)
            try:
                async with asyncio.timeout(5.0):
                    await ended.wait()
            except TimeoutError:
                send_signal(self.pidfd, signal.SIGKILL)
                await ended.wait()
            if self.is_child:
                # waitpid does not block: the pidfd is readable, so the process is a zombie
                # (pidfd_open(2)).
                os.waitpid(self.pid, 0)
        finally:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)


class _ZygoteProcess:
    """A zygote's process and the connection to it."""

    def __init__(self, spawned: _Spawned, sock: socket.socket) -> None:
        self._spawned, self.pid = spawned, spawned.pid
        self.peer = Peer(sock, "the zygote", self._received, self._lost)
        self._ready: asyncio.Future[ZygoteReady] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, preload: Sequence[str], keeper: str | None) -> _ZygoteProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            try:
                spawned = await _spawn_below(keeper, theirs.fileno(), preload)
            except BaseException:
                ours.close()
                raise
        process = cls(spawned, ours)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                answer = await process._ready
        except BaseException as error:
            await process.close(kill=True)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"the zygote did not start in {_START_TIMEOUT_S:g} s"
                ) from None
            raise
        if answer.error is not None:
            await process.close()
            raise PeerError(f"the zygote cannot start: {error_of(answer.error).message}")
        return process

    async def close(self, *, kill: bool = False) -> None:
        """Close the connection and wait until the process is reaped. `kill`: send SIGTERM as well,
        because a zygote notices the close only after its imports."""
        self.peer.close("the zygote was closed")
        if kill:
            send_signal(self._spawned.pidfd, signal.SIGTERM)
        await self._spawned.ended()

    def _received(self, message: ipc.Message) -> None:
        if not self._ready.done():
            self._ready.set_result(ZygoteReady.of(message, PeerError))

    def _lost(self) -> None:
        fail(self._ready, "the zygote has died")


async def _drain(process: _ZygoteProcess) -> None:
    """Close a replaced zygote when it has answered its requests, or at once when cancelled. The
    answers may take minutes, for example for the layers of a pull."""
    try:
        while process.peer.busy:
            await asyncio.sleep(_DRAIN_INTERVAL_S)
    finally:
        await asyncio.shield(process.close())


class _JobPipes:
    """The descriptors of one job: stdin, a result socket, and pipes from which the server reads
    stdout and stderr while the job runs."""

    def __init__(self, limit_bytes: int, fds_limit: int) -> None:
        self._limit_bytes, self._fds_limit = limit_bytes, fds_limit
        self._loop = asyncio.get_running_loop()
        self._outputs: list[_Output] = []
        self._result, self._their_result = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._result.setblocking(False)

    @contextlib.contextmanager
    def open_ends(self, stdin: bytes) -> Iterator[list[int]]:
        """Open the child's descriptors (stdin, stdout, stderr, result socket), and close them at
        the end of the `with` block."""
        ends = [self._their_result.detach()]
        try:
            for place in (0, 1):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                self._outputs.append(_Output(self._loop, ours, self._limit_bytes))
                ends.insert(place, theirs)
            # A memfd, because the loop would have to write into a pipe at the job's pace.
            ends.insert(0, ipc.open_memory("stdin", stdin))
            yield ends
        finally:
            close_all(ends)

    def result(self, exit_code: int) -> JobResult:
        """Return the job's output and descriptors. If the job reported an error, raises that
        error."""
        for output in self._outputs:
            output.drain()
        fds: list[int] = []
        try:
            # A hostile image may have taken over the job. The kernel closes descriptors beyond the
            # limit. With a limit of 0 it also closes the memfd of a long message, so the loop need
            # not parse up to 64 MiB.
            received = ipc.receive(self._result, self._fds_limit)
        except BlockingIOError:
            received = None
        if received:
            message, fds = received
            try:
                outcome = Outcome.of(message, PeerError)
                if outcome.error is not None:
                    raise error_of(outcome.error)
            except BaseException:
                close_all(fds)
                raise
        stdout, stderr = (bytes(output.content) for output in self._outputs)
        return JobResult(exit_code, stdout, stderr, fds)

    def close(self) -> None:
        for output in self._outputs:
            output.close()
        self._result.close()
        self._their_result.close()


class _Output:
    """Reads a job's stdout or stderr as data arrives, so that the job never waits. Data beyond
    `limit_bytes` is dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, limit_bytes: int) -> None:
        self.content = bytearray()
        self._fd: int | None = fd
        self._loop, self._limit_bytes = loop, limit_bytes
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._read)

    def drain(self) -> None:
        """Read the available output. Does not wait for the end of file, because a descendant may
        keep the pipe open."""
        for _ in range(1 + self._limit_bytes // _READ_BYTES):
            if not self._read():
                return

    def close(self) -> None:
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> bool:
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self.content += data[: self._limit_bytes - len(self.content)]
        return True


def _fields(arguments: Record | None) -> ipc.Message:
    return {} if arguments is None else arguments.to_fields()


async def _spawn_below(keeper: str | None, fd: int, preload: Sequence[str]) -> _Spawned:
    """Start a zygote with `fd` as the zygote's descriptor 3. The zygote is a child of the keeper in
    the folder `keeper`. Without `keeper`, or if that keeper cannot start it, the zygote is a child
    of the server."""
    if keeper is not None:
        starting = asyncio.ensure_future(
            asyncio.to_thread(_start_below, keeper, os.dup(fd), preload)
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)
            raise
        except Error as error:
            log.warning(
                "cannot start the keeper; pods end when their shim is killed: %s",
                error,
            )
    pid = _spawn(fd, preload)
    return _Spawned(pid, os.pidfd_open(pid), True)


def _abandon(starting: asyncio.Future[_Spawned]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        os.close(starting.result().pidfd)


def _start_below(folder: str, fd: int, preload: Sequence[str]) -> _Spawned:
    """Start a zygote as a child of the keeper; start the keeper if it does not run. Runs in a
    thread; closes `fd`. Raises Error."""
    with closing_fd(fd):
        keeper = ensure(folder)
        try:
            pid, pidfd = keeper.start(_command(preload), os.environ, {1: 2, 2: 2, _ZYGOTE_FD: fd})
        finally:
            keeper.close()
        _copy_oom_score(pid)
        return _Spawned(pid, pidfd, False)


def _copy_oom_score(pid: int) -> None:
    """Give the keeper's child `pid` the server's oom_score_adj. The child has inherited the
    keeper's value, which is so low that the OOM killer would choose the jobs of the child last.
    Does nothing when the child has ended or its oom_score_adj may not be changed."""
    own = Path("/proc/self/oom_score_adj").read_text()
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(own)
    except OSError as error:
        log.debug("cannot set the OOM score of the zygote %d: %s", pid, error)


def _command(preload: Sequence[str]) -> list[str]:
    """Return the command that starts a zygote: an interpreter without site-packages, with the
    server's search path."""
    path = ":".join([_OUR_PARENT, *(os.path.abspath(p) for p in sys.path if p)])
    # -I: neither PYTHONPATH nor the working directory can put a module before ours. -S: no .pth
    # file of site-packages is executed.
    return [sys.executable, "-I", "-S", "-c", _BOOT, str(_ZYGOTE_FD), path, *preload]


def _spawn(fd: int, preload: Sequence[str]) -> int:
    """Start the zygote as a child of the server, with `fd` as its descriptor 3 and default signal
    handlers. Return its pid."""
    catchable = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
    source = os.dup(fd)  # never the number 3 itself: a dup2 onto itself would keep close-on-exec
    try:
        while source <= _ZYGOTE_FD:
            source, lower = os.dup(source), source
            os.close(lower)
        return os.posix_spawn(
            sys.executable,
            _command(preload),
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
                (os.POSIX_SPAWN_DUP2, source, _ZYGOTE_FD),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=catchable,
        )
    finally:
        os.close(source)
