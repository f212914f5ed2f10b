"""ExecSync: a command in a running container, its output, its exit code; and what Exec shares with it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from cri_server.containers.spec import process
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox
from pyrunc import record
from pyrunc.errors import DeadlineExceeded, Error, InvalidArgument, NotFound, PeerError, WrongState
from pyrunc.shim.client import ExecSession, ShimClient

log = logging.getLogger(__name__)

# Both streams together; the client takes 16 MiB per message and the rest of the message needs room.
OUTPUT_LIMIT_BYTES = (16 << 20) - (64 << 10)
READ_BYTES = 1 << 16


class Output:
    """Reads a pipe as data comes, keeps what `budget` allows and drops the rest, so that the writer never waits."""

    def __init__(self, descriptor: int, budget: Budget) -> None:
        self.content = bytearray()
        self.ended = asyncio.Event()
        self._descriptor, self._budget = descriptor, budget
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._readable)

    def drain(self) -> None:
        """Take what is in the pipe now: a background child may hold its other end for ever."""
        for _ in range(64):
            if not self._readable():
                return

    def close(self) -> None:
        """Close the descriptor; fine when it is closed."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set()

    def _readable(self) -> bool:
        if self.ended.is_set():
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
        self.content += data[: self._budget.take(len(data))]
        return True


class Budget:
    """Bytes that several outputs share."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, wanted: int) -> int:
        """How many of `wanted` there is room for."""
        granted = min(wanted, self._left)
        self._left -= granted
        return granted


def running(services: Services, reference: str) -> tuple[Sandbox, Container, ShimClient]:
    """A running container and its shim. Raises NotFound, WrongState, PeerError."""
    container = services.index.containers.get(reference)
    if not container.running:
        raise WrongState(f"container {container.id} is not running")
    sandbox = services.index.sandboxes.get(container.sandbox_id)
    return sandbox, container, services.shims.get(sandbox)


def oci_process(
    services: Services, container: Container, command: Sequence[str], *, tty: bool
) -> dict[str, Any]:
    """The container's own process with another argv. Raises InvalidArgument."""
    spec = record.read_json(str(services.paths.container_state(container.id) / "config.json"))
    return process.with_arguments(spec["process"], command, tty=tty)


async def sync(
    services: Services, reference: str, command: Sequence[str], timeout_s: int
) -> tuple[bytes, bytes, int]:
    """stdout, stderr and exit code (128 + n after signal n). `timeout_s` 0: none.

    Raises NotFound, WrongState, DeadlineExceeded (the process and its descendants are dead then), KernelError.
    """
    _, container, client = running(services, reference)
    described = oci_process(services, container, command, tty=False)
    session = await begin(client, container, described, stdout=True, stderr=True)
    assert session.stdout_fd is not None and session.stderr_fd is not None
    budget = Budget(OUTPUT_LIMIT_BYTES)
    outputs = [Output(session.stdout_fd, budget), Output(session.stderr_fd, budget)]
    try:
        code = await _exit_code(client, session, container, float(timeout_s))
        for output in outputs:
            output.drain()
        return bytes(outputs[0].content), bytes(outputs[1].content), code
    finally:
        for output in outputs:
            output.close()


async def begin(
    client: ShimClient, container: Container, described: dict[str, Any], **streams: bool
) -> ExecSession:
    """Start the process. A program that is not there is the caller's mistake, not a container that is not there."""
    try:
        return await client.exec(container.id, new_exec_id(), described, **streams)
    except NotFound as error:
        if container.running:
            raise InvalidArgument(error.message) from None
        raise


async def _exit_code(client: ShimClient, session: ExecSession, container: Container, timeout_s: float) -> int:
    try:
        return await asyncio.wait_for(asyncio.shield(session.exited), timeout_s or None)
    except TimeoutError:
        await end(client, session.exec_id)
        raise DeadlineExceeded(
            f"command in container {container.id} took longer than {timeout_s:g} s"
        ) from None
    except asyncio.CancelledError:
        task = asyncio.get_running_loop().create_task(end(client, session.exec_id))
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        raise


_ending: set[asyncio.Task[None]] = set()


async def end(client: ShimClient, exec_id: str) -> None:
    """Kill a session; fine when it or its shim is gone."""
    try:
        await client.kill_exec(exec_id)
    except PeerError:
        pass
    except Error as error:
        log.debug("exec %s: %s", exec_id, error)


def new_exec_id() -> str:
    """An id that no other session has."""
    return os.urandom(16).hex()
