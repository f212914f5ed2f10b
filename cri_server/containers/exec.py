"""ExecSync: runs a command in a running container and waits for its end. The verb Exec also uses
`begin`, which starts a command with streams."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cri_server.containers import pause
from cri_server.observability.timeline.trace import span
from cri_server.pod.client import ExecSession
from cri_server.pod.pod import Pod
from cri_server.services import Services
from cri_server.spec import process
from cri_server.store.model import Container
from pyrunc import atomic_file
from pyrunc.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KernelError,
    NotFound,
    WrongState,
)
from pyrunc.shim import messages

# The limit of stdout and stderr together. A gRPC client accepts 16 MiB per message, of which 64 KiB
# are reserved for the other fields. Without a limit a command could fill the node's memory
# (CVE-2022-1708, CVE-2022-31030).
OUTPUT_LIMIT_BYTES = (16 << 20) - (64 << 10)
READ_BYTES = 1 << 16
# The limit of each stream in memory. Further output goes to a file, so that many large outputs do
# not fill the memory.
MEMORY_BYTES = 1 << 15
# Most commands, such as probes, end earlier, and then the shim's answer has their output.
EXIT_WITHIN_MS = 10


class ExecOutput:
    """Reads the output of a command from a pipe. Stores as much as `budget` allows and drops the
    rest, so that the writer does not block.

    Output beyond `MEMORY_BYTES` goes to an unnamed file in `folder`.
    """

    def __init__(self, descriptor: int, budget: OutputBudget, folder: Path) -> None:
        self.size = 0  # bytes stored
        self._closed = False
        self._content = bytearray()
        self._descriptor, self._budget, self._folder = descriptor, budget, folder
        self._file: IO[bytes] | None = None
        self._error: OSError | None = None
        self._writing: asyncio.Future[None] | None = None
        self._discarded = False
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(self._descriptor, self._readable)

    @property
    def in_memory(self) -> bool:
        """Return whether `content` is the whole output."""
        return self._file is None

    @property
    def content(self) -> bytes:
        """Return the part of the output that is in memory: its beginning."""
        return bytes(self._content)

    async def drain(self) -> None:
        """Read the data that is in the pipe now. Does not wait for the end of file, because a
        background child may keep the other end open forever. Raises KernelError."""
        for _ in range(64):
            if self._writing is not None:
                await asyncio.wait((self._writing,))
            if not self._readable():
                break
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        if self._error is not None:
            raise KernelError(
                "write", "the output of the command", self._error.errno or 0
            ) from self._error

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the stored output in pieces. The caller must have called `close`."""
        if self._content:
            yield bytes(self._content)
        at = len(self._content)
        while at < self.size:
            assert self._file is not None
            data = await asyncio.to_thread(
                os.pread, self._file.fileno(), READ_BYTES, at - len(self._content)
            )
            if not data:
                raise KernelError("read", "the output of the command", errno.EIO)
            yield data
            at += len(data)

    def close(self) -> None:
        """Stop reading and close the pipe; does nothing if it is already closed."""
        if not self._closed:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._closed = True

    def discard(self) -> None:
        """Close the pipe and free the stored output. If a thread is still writing the file, the
        file is closed after this write."""
        self.close()
        self._discarded = True
        if self._writing is None and self._file is not None:
            self._file.close()

    def _readable(self) -> bool:
        if self._closed:
            return False
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        if accepted := data[: self._budget.take(len(data))]:
            self._store(accepted)
        return True

    def _store(self, data: bytes) -> None:
        if self._file is None and self.size + len(data) <= MEMORY_BYTES:
            self._content += data
            self.size += len(data)
        elif self._error is None:
            # Reading pauses until the thread has written: the disk may be slow.
            self._loop.remove_reader(self._descriptor)
            self._writing = self._loop.run_in_executor(None, self._write, data)
            self._writing.add_done_callback(self._written)

    def _write(self, data: bytes) -> None:
        """Append output to the unnamed file; make the file at the first call. Runs in a thread."""
        if self._file is None:
            # Without a name (O_TMPFILE, open(2)), so that a killed server leaves nothing behind.
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        atomic_file.write_all(self._file.fileno(), data)
        self.size += len(data)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        error = None if writing.cancelled() else writing.exception()
        if isinstance(error, OSError):
            self._error = error
        if self._discarded:
            self.discard()
        elif not self._closed:
            self._loop.add_reader(self._descriptor, self._readable)


@dataclass(frozen=True, slots=True)
class ShortOutcome:
    """The result of a command whose output is in memory. `exit_code` is 128 + n after signal n."""

    stdout: bytes
    stderr: bytes
    exit_code: int


@dataclass(frozen=True, slots=True)
class LongOutcome:
    """The result of a command whose output is partly in a file. The caller must call `discard`."""

    stdout: ExecOutput
    stderr: ExecOutput
    exit_code: int

    def discard(self) -> None:
        """Free the output of stdout and stderr."""
        self.stdout.discard()
        self.stderr.discard()


class OutputBudget:
    """A byte limit that several outputs share."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> int:
        """Take up to `size` bytes from the budget; returns how many were granted."""
        granted = min(size, self._left)
        self._left -= granted
        return granted


def require_running(services: Services, reference: str) -> tuple[Container, Pod]:
    """Return a running container and its pod. Raises NotFound, WrongState, Unavailable (without a
    shim)."""
    container = services.index.containers.get(reference)
    if not container.running:
        raise WrongState(f"container {container.id} is not running")
    pod = services.pod(services.index.sandboxes.get(container.sandbox_id))
    pod.require_shim()
    return container, pod


def oci_process(
    services: Services,
    container: Container,
    command: Sequence[str],
    changes: Mapping[str, Any] | None,
    *,
    tty: bool,
) -> dict[str, Any]:
    """Return the OCI process object for a command, with `changes` (see `begin`) applied. The shim
    adds missing members, such as `user` and `cwd`, from the container's own process. Raises
    InvalidArgument."""
    # The common case, such as probes. The shim has the configuration in memory, so config.json is
    # not read.
    if not tty and changes is None:
        return process.with_arguments({}, command, tty=False)
    spec = atomic_file.read_json(str(services.paths.container_state(container.id) / "config.json"))
    described = process.with_arguments(spec["process"], command, tty=tty)
    return described if changes is None else process.changed(described, changes)


async def sync(
    services: Services, reference: str, command: Sequence[str], timeout_s: int
) -> ShortOutcome | LongOutcome:
    """Run a command in a container to its end and return the result. `timeout_s` 0: no limit.

    Raises NotFound, WrongState, InvalidArgument (such as a missing executable), DeadlineExceeded
    (the process and its descendants have been killed), KernelError, PeerError.
    """
    container, pod = require_running(services, reference)
    session = await begin(
        services,
        container,
        pod,
        command,
        exit_within_ms=EXIT_WITHIN_MS,
        stdout=True,
        stderr=True,
    )
    if session.output is not None:
        return ShortOutcome(*session.output, session.exited.result())
    assert session.stdout_fd is not None and session.stderr_fd is not None
    budget = OutputBudget(OUTPUT_LIMIT_BYTES)
    stdout, stderr = (
        ExecOutput(fd, budget, services.paths.root) for fd in (session.stdout_fd, session.stderr_fd)
    )
    try:
        with span("command"):
            code = await _exit_code(pod, session, container, float(timeout_s))
        for output in (stdout, stderr):
            await output.drain()
            output.close()
    except BaseException:
        stdout.discard()
        stderr.discard()
        raise
    if stdout.in_memory and stderr.in_memory:
        return ShortOutcome(stdout.content, stderr.content, code)
    return LongOutcome(stdout, stderr, code)


async def begin(
    services: Services,
    container: Container,
    pod: Pod,
    command: Sequence[str],
    *,
    tty: bool = False,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExecSession:
    """Start a command in a container of `pod` and return the session.

    - `changes`: `user`, `cwd` and `env` that override those of the container's OCI process.
    - `options`: fields of `messages.StartExec`: `exit_within_ms`, and for each stream that the
      session has, `stdin`, `stdout` or `stderr` with the value True.

    A missing executable raises InvalidArgument, because kubelet takes NotFound for a missing
    container. Raises InvalidArgument, WrongState, KernelError, PeerError.
    """
    pause.refuse_paused(container)
    try:
        oci = oci_process(services, container, command, changes, tty=tty)
        request = messages.StartExec(container.id, os.urandom(16).hex(), oci, tty=tty, **options)
        return await pod.exec(request)
    except NotFound as error:
        if container.running:
            raise InvalidArgument(error.message) from None
        raise


async def _exit_code(pod: Pod, session: ExecSession, container: Container, timeout_s: float) -> int:
    try:
        # A timeout must not cancel the future, which the shim's event sets.
        await asyncio.wait((session.exited,), timeout=timeout_s or None)
    except asyncio.CancelledError:
        task = asyncio.get_running_loop().create_task(pod.kill_exec(session.exec_id))
        # A cancelled call cannot wait for the kill, and the event loop has only weak references to
        # tasks.
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        raise
    if session.exited.done():
        return session.exited.result()
    await pod.kill_exec(session.exec_id)
    # kubelet takes this code for a probe that has timed out, others for a failed call
    # (cri-client, remote_runtime.go).
    raise DeadlineExceeded(f"command in container {container.id} took longer than {timeout_s:g} s")


_ending: set[asyncio.Task[None]] = set()
