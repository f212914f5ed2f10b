"""Exec and attach: a session's descriptors joined to a client's streams, and how such a session
ends.

A session ends when its process does, whether or not the client has ended stdin. What the process
wrote before is sent first, then the status on the error stream, then the outputs end. A client that
leaves ends the session at once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from dataclasses import dataclass

from cri_server.streaming import failures
from cri_server.streaming.backend import Session
from cri_server.streaming.descriptors import read_some, write_all
from cri_server.streaming.streams import Inbound, Outbound, StreamGone
from pyrunc.errors import Error

# A grandchild may hold an output open for ever. After the exit, silence of QUIET_S ends an output;
# so does, after DRAIN_S, more than a pipe can have held at the exit.
QUIET_S = 0.25
DRAIN_S = 5.0
DRAIN_BYTES = 1024 * 1024
RESIZE_LIMIT_BYTES = 1024


@dataclass(slots=True)
class CommandStreams:
    """A client's streams; `None` where it has none.

    `json_status`: the error stream carries a Status object. `resize` may come at any time, or
    never.
    """

    error: Outbound
    json_status: bool
    stdin: Inbound | None = None
    stdout: Outbound | None = None
    stderr: Outbound | None = None
    resize: asyncio.Future[Inbound] | None = None


async def run(opening: Awaitable[Session], streams: CommandStreams) -> None:
    """Open the session, serve it to its end and tell the client how it ended. Cancelled when the
    client leaves."""
    try:
        exit_code = await _open_and_serve(opening, streams)
    except StreamGone:
        return
    except Error as error:
        failures.note("exec or attach", error)
        await tell(streams, failure(error.message), error.message)
    except Exception:
        # Ours to explain, in the log; the client must not take silence for success.
        await tell(streams, failure("internal error"), "internal error")
        raise
    else:
        # The status comes before the ends: a v1 client that has seen all ends does not wait for it.
        await tell(streams, *exit_status(exit_code))
        await _end(streams)


async def _open_and_serve(opening: Awaitable[Session], streams: CommandStreams) -> int:
    session = await _open(opening)
    try:
        return await _serve(session, streams)
    finally:
        await _finish(session)


async def _open(opening: Awaitable[Session]) -> Session:
    """Await the session. If this is cancelled meanwhile, the session is closed as soon as it is
    there."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close_unwanted)
        raise


_closing: set[asyncio.Task[None]] = set()


def _close_unwanted(task: asyncio.Future[Session]) -> None:
    if not task.cancelled() and task.exception() is None:
        closing = asyncio.ensure_future(task.result().close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


async def _finish(session: Session) -> None:
    """Close the session, also if this task is cancelled while it does."""
    closing = asyncio.ensure_future(session.close())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    await asyncio.shield(closing)


async def _serve(session: Session, streams: CommandStreams) -> int:
    """Move bytes until the process has ended and its output is sent; its exit code."""
    for fd in (session.stdin_fd, session.stdout_fd, session.stderr_fd):
        if fd is not None:
            os.set_blocking(fd, False)
    inputs = [asyncio.create_task(_copy_in(session, streams.stdin))] if streams.stdin else []
    if streams.resize:
        inputs.append(asyncio.create_task(_copy_sizes(session, streams.resize)))
    outputs = [
        Output(fd, out)
        for fd, out in ((session.stdout_fd, streams.stdout), (session.stderr_fd, streams.stderr))
        if fd is not None and out is not None
    ]
    tasks = {asyncio.create_task(output.copy()): output for output in outputs}
    try:
        exit_code = await session.wait()
        await _drain(tasks)
        return exit_code
    finally:
        for task in (*inputs, *tasks):
            task.cancel()
        await asyncio.gather(*inputs, *tasks, return_exceptions=True)


async def _copy_in(session: Session, stdin: Inbound) -> None:
    """Client to process. A process that does not read any more does not stop the client from
    sending."""
    try:
        while session.stdin_fd is not None and (data := await stdin.read()):
            await write_all(session.stdin_fd, data)
    except OSError:
        stdin.discard()
    except StreamGone:
        return
    session.close_stdin()


async def _copy_sizes(session: Session, opening: asyncio.Future[Inbound]) -> None:
    resize, sizes = await asyncio.shield(opening), TerminalSizes()
    try:
        while not sizes.broken and (data := await resize.read()):
            size = sizes.feed(data)
            if size is not None:
                await _resize(session, *size)
    except StreamGone:
        return
    resize.discard()


class TerminalSizes:
    """Terminal sizes in what a client sends: JSON objects one behind the other; of those that came
    together the last counts.

    Only that one is decoded, so the work is one search per portion however many objects it holds. A
    size has no objects inside, so its braces are the last pair. `broken`: what comes cannot be
    sizes any more.
    """

    def __init__(self) -> None:
        self.broken = False
        self._rest = b""

    def feed(self, data: bytes) -> tuple[int, int] | None:
        """Width and height of the last size that `data` completes, if it does and they are in
        range."""
        if self.broken:
            return None
        text = self._rest + data
        end = text.rfind(b"}") + 1
        begin = text.rfind(b"{", 0, end)
        self._rest = text[end:]
        self.broken = len(self._rest) > RESIZE_LIMIT_BYTES
        return _size(text[begin:end]) if begin >= 0 and end - begin <= RESIZE_LIMIT_BYTES else None


def _size(text: bytes) -> tuple[int, int] | None:
    try:
        size = json.loads(text)
    except (ValueError, RecursionError):
        return None
    sides = {key.lower(): value for key, value in size.items()}
    width, height = sides.get("width"), sides.get("height")
    if (
        isinstance(width, int)
        and isinstance(height, int)
        and 0 < width < 65536
        and 0 < height < 65536
    ):
        return width, height
    return None


async def _resize(session: Session, width: int, height: int) -> None:
    try:
        await session.resize(width, height)
    except Error:
        pass  # the process has just ended, or has no terminal


@dataclass(slots=True)
class Output:
    """Process to client: one descriptor and its stream."""

    fd: int
    out: Outbound
    sent_bytes: int = 0
    sending: bool = False

    async def copy(self) -> None:
        """Copy to the end. When the client has dropped the stream the rest is thrown away, so the
        process goes on."""
        wanted = True
        while data := await read_some(self.fd):
            self.sending = True
            if wanted:
                try:
                    await self.out.write(data)
                except StreamGone:
                    wanted = False
            else:
                await asyncio.sleep(0)
            self.sending = False
            self.sent_bytes += len(data)


async def _drain(tasks: dict[asyncio.Task[None], Output]) -> None:
    """After the exit: wait for the outputs to end, or to be silent, or to be more than what was
    left."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DRAIN_S
    at_exit = {task: output.sent_bytes for task, output in tasks.items()}
    pending = set(tasks)
    while pending:
        before = {task: tasks[task].sent_bytes for task in pending}
        _, pending = await asyncio.wait(pending, timeout=QUIET_S)
        late = loop.time() > deadline
        pending = {
            task
            for task in pending
            if (tasks[task].sending or tasks[task].sent_bytes != before[task])
            and not (late and tasks[task].sent_bytes - at_exit[task] > DRAIN_BYTES)
        }


async def _end(streams: CommandStreams) -> None:
    for out in (streams.stdout, streams.stderr):
        if out is not None:
            try:
                await out.end()
            except StreamGone:
                pass  # the client has dropped this stream, not the session


async def tell(streams: CommandStreams, status: dict[str, object], text: str) -> None:
    """Write the outcome on the error stream: the Status object, or for old clients a text if
    something failed."""
    try:
        if streams.json_status:
            await streams.error.write(json.dumps(status).encode())
        elif text:
            await streams.error.write(text.encode())
        await streams.error.end()
    except StreamGone:
        pass


def exit_status(exit_code: int) -> tuple[dict[str, object], str]:
    """How an exit code is told: as a Status object and as a text."""
    if exit_code == 0:
        return {"metadata": {}, "status": "Success"}, ""
    text = f"command terminated with exit code {exit_code}"
    causes = [{"reason": "ExitCode", "message": str(exit_code)}]
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": text,
        "details": {"causes": causes},
    }, text


def failure(message: str) -> dict[str, object]:
    """How a session that could not be served is told."""
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "InternalError",
        "message": message,
        "code": 500,
        "details": {"causes": [{"message": message}]},
    }
