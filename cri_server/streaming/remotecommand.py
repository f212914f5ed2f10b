"""Serves exec and attach: copies between a session's descriptors and a client's streams, and
reports the exit.

A session ends with its process, even if the client has not ended stdin. The server then sends the
remaining output, the status on the error stream, and the end of the output streams. When the client
disconnects, the session ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable
from dataclasses import dataclass

from cri_server.streaming import failures
from cri_server.streaming.backend import StreamingSession
from cri_server.streaming.descriptors import read_some, write_all
from cri_server.streaming.streams import Inbound, Outbound, StreamGone
from pyrunc.errors import Error

# A grandchild may hold an output open for ever. So after the exit the server stops reading an
# output that pauses for QUIET_S, and after DRAIN_S one that has sent more than a pipe can hold.
QUIET_S = 0.25
DRAIN_S = 5.0
DRAIN_BYTES = 1024 * 1024
RESIZE_LIMIT_BYTES = 1024


@dataclass(slots=True)
class CommandStreams:
    """The streams of an exec or attach client; `None` for streams that it did not request.

    `json_status`: the error stream carries a Status object; `resize`: a future for the stream of
    terminal sizes, which the client may open later or never.
    """

    error: Outbound
    json_status: bool
    stdin: Inbound | None = None
    stdout: Outbound | None = None
    stderr: Outbound | None = None
    resize: asyncio.Future[Inbound] | None = None


async def run(opening: Awaitable[StreamingSession], streams: CommandStreams) -> None:
    """Open a session, serve it to its end, and send its status to the client. The caller cancels
    this coroutine when the client disconnects."""
    try:
        exit_code = await _open_and_serve(opening, streams)
    except StreamGone:
        return
    except Error as error:
        failures.log_failure("exec or attach", error)
        await send_status(streams, failure(error.message), error.message)
    except Exception:
        # A bug, which the caller logs; without a status the client would assume success.
        await send_status(streams, failure("internal error"), "internal error")
        raise
    else:
        # Status first: a v1 client does not wait for it once all streams have ended.
        await send_status(streams, *exit_status(exit_code))
        await _end(streams)


async def _open_and_serve(opening: Awaitable[StreamingSession], streams: CommandStreams) -> int:
    session = await _open(opening)
    try:
        return await _serve(session, streams)
    finally:
        await asyncio.shield(_close(session))


async def _open(opening: Awaitable[StreamingSession]) -> StreamingSession:
    """Await the session and return it. If the caller is cancelled meanwhile, the session is closed
    once it is open."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close_when_opened)
        raise


# The event loop has only weak references to tasks (asyncio.create_task).
_closing: set[asyncio.Task[None]] = set()


def _close_when_opened(task: asyncio.Future[StreamingSession]) -> None:
    if not task.cancelled() and task.exception() is None:
        _close(task.result())


def _close(session: StreamingSession) -> asyncio.Task[None]:
    """Close the session in a task that continues even if the caller is cancelled."""
    closing = asyncio.ensure_future(session.close())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    return closing


async def _serve(session: StreamingSession, streams: CommandStreams) -> int:
    """Copy all streams until the process has ended and its output is sent; return the exit code."""
    for fd in (session.stdin_fd, session.stdout_fd, session.stderr_fd):
        if fd is not None:
            os.set_blocking(fd, False)
    inputs = [asyncio.create_task(_copy_in(session, streams.stdin))] if streams.stdin else []
    if streams.resize:
        inputs.append(asyncio.create_task(_copy_sizes(session, streams.resize)))
    outputs = [
        OutputCopy(fd, out)
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


async def _copy_in(session: StreamingSession, stdin: Inbound) -> None:
    """Copy stdin from the client to the process. After the process has closed stdin, discard the
    data."""
    try:
        while session.stdin_fd is not None and (data := await stdin.read()):
            await write_all(session.stdin_fd, data)
    except OSError:
        stdin.discard()
    except StreamGone:
        return
    session.close_stdin()


async def _copy_sizes(session: StreamingSession, opening: asyncio.Future[Inbound]) -> None:
    resize, sizes = await asyncio.shield(opening), TerminalSizes()
    try:
        while not sizes.broken and (data := await resize.read()):
            size = sizes.feed(data)
            if size is not None:
                with contextlib.suppress(Error):  # the process has ended, or has no terminal
                    await session.resize(*size)
    except StreamGone:
        return
    resize.discard()


class TerminalSizes:
    """Parses terminal sizes, which a client sends as a sequence of JSON objects. Of each received
    piece only the last size is parsed, because it replaces the earlier ones.

    `broken`: too many bytes came without a size, and all further data is ignored.
    """

    def __init__(self) -> None:
        self.broken = False
        self._rest = b""

    def feed(self, data: bytes) -> tuple[int, int] | None:
        """Add received data. Return width and height of the last size that these data complete;
        None if they complete none, or an invalid one."""
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
    # Go's TerminalSize has no JSON tags, so Go clients send "Width" and "Height". Go's decoder
    # ignores the case of keys, so this one does, too.
    sides = {key.lower(): value for key, value in size.items()}
    width, height = sides.get("width"), sides.get("height")
    if (
        # `struct winsize` has unsigned shorts (ioctl_tty(2)).
        isinstance(width, int)
        and isinstance(height, int)
        and 0 < width < 65536
        and 0 < height < 65536
    ):
        return width, height
    return None


@dataclass(slots=True)
class OutputCopy:
    """Copies one output of the process, from its descriptor `fd` to the client."""

    fd: int
    out: Outbound
    sent_bytes: int = 0
    sending: bool = False

    async def copy(self) -> None:
        """Copy the process's output to the client until the output ends. If the client resets the
        stream, discard the remaining output, so that the process does not block."""
        connected = True
        while data := await read_some(self.fd):
            self.sending = True
            if connected:
                try:
                    await self.out.write(data)
                except StreamGone:
                    connected = False
            else:
                await asyncio.sleep(0)
            self.sending = False
            self.sent_bytes += len(data)


async def _drain(tasks: dict[asyncio.Task[None], OutputCopy]) -> None:
    """After the process's exit, wait for the rest of each output, until it ends or pauses for
    `QUIET_S`. After `DRAIN_S`, also stop waiting for an output that has sent more than
    `DRAIN_BYTES` since the exit, so that a busy output cannot keep the session open."""
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
            with contextlib.suppress(StreamGone):  # the client has reset this stream only
                await out.end()


async def send_status(streams: CommandStreams, status: dict[str, object], text: str) -> None:
    """Report the end of a session on the error stream, and end the stream. Sends the Status object
    `status` as JSON. Old clients get `text` instead; it is empty after a success."""
    with contextlib.suppress(StreamGone):
        if streams.json_status:
            await streams.error.write(json.dumps(status).encode())
        elif text:
            await streams.error.write(text.encode())
        await streams.error.end()


def exit_status(exit_code: int) -> tuple[dict[str, object], str]:
    """Return the Status object for an exit code, and the text for clients that do not know Status
    objects."""
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
    """Return the Status object for a session that could not be served because of `message`."""
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "InternalError",
        "message": message,
        "code": 500,
        "details": {"causes": [{"message": message}]},
    }
