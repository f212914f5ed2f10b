"""One client's connection: bytes from the socket to calls, answers of calls to bytes.

What can be answered at once is, in the same pass that read the request; everything else is a task
of its own, which a reset, a deadline, the end of the connection or of the server cancels. A client
that does not read is not read either. While more than `BACKLOG_BYTES` wait for it, no further
answer is made: what it asks stands in line, in order, until it has taken some of what waits, is
reset or reaches its deadline.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from types import AsyncGeneratorType, CoroutineType
from typing import TYPE_CHECKING, Any, cast

from cri_server.http2.connection import Connection
from cri_server.http2.events import Data, Drained, Event, Failed, Opened, Ready, Reset
from cri_server.http2.frames import ErrorCode
from cri_server.observability.timeline.trace import ORIGIN
from cri_server.rpc import codes, grpc_framing
from cri_server.rpc.codes import CallFailed, Code
from cri_server.rpc.grpc_framing import Incoming, NotGrpc
from cri_server.rpc.methods import Method, Parts
from pyrunc.errors import Error

if TYPE_CHECKING:
    from cri_server.rpc.server import Server

BACKLOG_BYTES = 4 << 20
FLUSH_S = 5.0  # how long a connection that is being closed may take to read what was written
SKIPPED_BYTES = 16 << 10  # of a request that is not gRPC, before it is answered


class Call:
    """A call that is not answered yet."""

    __slots__ = (
        "admitted", "deadline_s", "held", "incoming", "method", "origin", "queued", "reserved_bytes", "started", "stream_id", "streaming",
        "task", "timer", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        stream_id: int,
        method: Method,
        incoming: Incoming,
        deadline_s: float | None,
        origin: str,
    ) -> None:
        self.stream_id = stream_id
        self.method = method
        self.incoming = incoming
        self.deadline_s = deadline_s
        self.origin = origin
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.streaming = False
        self.started = False  # whether the head of the answer was sent
        self.held = False  # whether it counts as open though its stream is closed
        self.queued = False  # whether a message waits for the client's window
        self.waiter: asyncio.Future[None] | None = None
        self.admitted: asyncio.Future[None] | None = None  # set while its answer stands in line
        self.reserved_bytes = 0


class Link(asyncio.BufferedProtocol):
    """The protocol of one connection of `server`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(server.limits)
        self._calls: dict[int, Call] = {}
        self._others: dict[
            int, list[int]
        ] = {}  # requests that are not gRPC: what HTTP answers, bytes skipped
        self._opened: list[Call] = []  # in this pass
        # Calls that stand in line, with the request of those that were not begun.
        self._line: deque[tuple[Call, bytes | None]] = deque()
        self._answered_bytes = 0  # in this pass, so not yet with the transport
        self._transport: asyncio.Transport | None = None
        self._paused = False
        # Ends the connection when the client does not greet, and later when it does not take the
        # last answers.
        self._patience: asyncio.TimerHandle | None = None
        self.active_s, self._served = self._loop.time(), False

    @property
    def idle(self) -> bool:
        """Whether nobody would miss it."""
        return not self._calls and not self._connection.held

    @property
    def answering(self) -> bool:
        """Whether it has asked for something that is not done; a request that is not complete is
        nothing yet."""
        begun = any(call.task is not None for call in self._calls.values())
        return begun or bool(self._line) or self._connection.held > 0

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._patience = self._loop.call_later(self._server.greeting_s, self._transport.abort)
        self._flush()
        self._server.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._cancel_timeout()
        self._connection.lose()
        self._drop_calls()
        self._line.clear()
        self._server.left(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer

    def buffer_updated(self, size: int) -> None:
        self.active_s = self._loop.time()
        for event in self._connection.receive(bytes(self._server.buffer[:size])):
            self._take(event)
        if self._opened:
            self._watch_opened()
        self._flush()

    def pause_writing(self) -> None:
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        for call in list(self._calls.values()):
            self._wake(call)
        if self._line:
            self._flush()

    def _flush(self) -> None:
        """Send what the connection has to say, and answer those who stand in line for which that
        made room."""
        self._write()
        while self._line and not self._is_backlogged():
            call, payload = self._line.popleft()
            if payload is None:
                if call.admitted is not None and not call.admitted.done():
                    call.admitted.set_result(None)
                    break  # it comes back here when it has been sent, or has ended
            elif self._calls.get(call.stream_id) is call:
                self._start(call, payload)
                self._write()
        if self._connection.leaving and self.idle and not self._connection.queued_bytes:
            self._leave()

    def _write(self) -> None:
        data, transport = self._connection.data_to_send(), self._transport
        self._answered_bytes = 0
        if data and transport is not None and not transport.is_closing():
            transport.write(data)

    def _is_backlogged(self) -> bool:
        """Whether the client has to read before it is answered again."""
        return self._paused or self._connection.queued_bytes + self._answered_bytes > BACKLOG_BYTES

    async def _room(self, call: Call) -> None:
        """Return when the client has taken enough of what waits for it."""
        while self._is_backlogged():
            call.admitted = self._loop.create_future()
            self._line.append((call, None))
            try:
                await call.admitted
            finally:
                call.admitted = None

    def _leave(self) -> None:
        """Close when what was written has been read, or cannot be."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._cancel_timeout()
            self._patience = self._loop.call_later(FLUSH_S, transport.abort)
            transport.close()

    # -- the connection's events

    def _take(self, event: Event) -> None:
        if type(event) is Data:
            call = self._calls.get(event.stream_id)
            if call is not None:
                self._data(call, event.data, event.ended)
            elif event.stream_id in self._others:
                self._other_data(event.stream_id, len(event.data), event.ended)
        elif type(event) is Opened:
            self._request(event)
        elif type(event) is Reset:
            self._connection.held -= 1
            self._others.pop(event.stream_id, None)
            self._drop(event.stream_id)
        elif type(event) is Drained:
            call = self._calls.get(event.stream_id)
            if call is not None:
                call.queued = False
                self._wake(call)
        elif type(event) is Ready:
            self._cancel_timeout()
        elif type(event) is Failed:
            code = ErrorCode(event.code).name
            self._server.complain(code, f"a client is cut off: {code}: {event.reason}")
            self._flush()
            self._drop_calls()
            self._leave()

    def _cancel_timeout(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    # -- requests

    def _request(self, event: Opened) -> None:
        if not self._connection.is_open(event.stream_id):
            return  # reset in the same breath
        if event.fields is None:
            limit = self._server.limits.header_list_bytes
            self._end(
                event.stream_id,
                False,
                Code.RESOURCE_EXHAUSTED,
                f"headers of more than {limit} bytes",
            )
            return
        try:
            head = grpc_framing.parse_head(event.fields)
            method = self._server.methods.get(head.path)
            if method is None:
                path = head.path[:200].decode("utf-8", "replace")
                raise CallFailed(Code.UNIMPLEMENTED, f"there is no call {path}")
        except NotGrpc as other:
            self._others[event.stream_id] = [other.http_status, 0]
            self._other_data(event.stream_id, 0, event.ended)
            return
        except CallFailed as failed:
            self._end(event.stream_id, False, failed.code, failed.message)
            return
        deadline_s = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        call = Call(event.stream_id, method, Incoming(head.encoding), deadline_s, head.origin)
        self._calls[event.stream_id] = call
        if not self._served:
            self._served = True
            self._server.spoke(self)
        self._opened.append(call)
        if event.ended:
            self._data(call, b"", True)

    def _other_data(self, stream_id: int, size: int, ended: bool) -> None:
        """A part of a request that is not gRPC: answered at its end, or without it when it is long
        (RFC 9113, 8.1)."""
        state = self._others[stream_id]
        state[1] += size
        if not ended and state[1] <= SKIPPED_BYTES:
            return
        del self._others[stream_id]
        if self._connection.is_open(stream_id):
            block, body = grpc_framing.not_grpc_answer(state[0])
            self._connection.send_headers(stream_id, block)
            self._connection.send_data(stream_id, body)
            self._connection.send_headers(stream_id, b"", end=True)

    def _data(self, call: Call, data: bytes, ended: bool) -> None:
        if call.task is not None or not self._connection.is_open(call.stream_id):
            return
        if ended and call.incoming.length is None:
            payload = grpc_framing.whole_message(data)
            if payload is not None:
                self._start(call, payload)
                return
        try:
            credit = call.incoming.add(data)
            if credit:
                self._reserve(call, call.incoming.length or 0)
                self._connection.credit(call.stream_id, credit)
            if not ended:
                self._reserve(call, call.incoming.received)
            if ended:
                self._start(call, call.incoming.finish())
        except CallFailed as failed:
            self._fail(call, failed)

    def _reserve(self, call: Call, size: int) -> None:
        """Count a request that comes in parts, and is or will be so long, against what all clients
        may have under way.

        Raises CallFailed.
        """
        more = max(0, size - call.reserved_bytes)
        if not self._server.reserve(more):
            raise CallFailed(Code.RESOURCE_EXHAUSTED, "too many large requests at once")
        call.reserved_bytes += more

    def _watch_opened(self) -> None:
        """Deadlines of what this pass has not answered."""
        for call in self._opened:
            if call.deadline_s is not None and self._calls.get(call.stream_id) is call:
                call.timer = self._loop.call_at(call.deadline_s, self._expire, call)
        self._opened.clear()

    # -- answers

    def _start(self, call: Call, payload: bytes) -> None:
        """Decode the request and answer it, or start the task that will."""
        if self._is_backlogged():
            self._line.append((call, payload))
            return
        method = call.method
        try:
            request = method.decode(payload)
        except Error as error:
            self._fail(call, error)
            return
        except Exception as error:
            self._fail(call, CallFailed(Code.INTERNAL, f"the request cannot be decoded: {error}"))
            return
        try:
            found = method.answer(request)
            if type(found) in (CoroutineType, AsyncGeneratorType):
                self._begin(call, found)
            else:
                self._answer(call, found)
        except Exception as error:
            self._fail(call, error)

    def _begin(self, call: Call, work: Any) -> None:
        """Start the task of a coroutine or a stream. Raises CallFailed when there are too many."""
        call.streaming = type(work) is AsyncGeneratorType
        if not self._server.started():
            if not call.streaming:
                work.close()
            raise CallFailed(Code.RESOURCE_EXHAUSTED, "too many calls at once")
        answering = self._stream(call, work) if call.streaming else self._unary(call, work)
        context = None
        if call.origin:
            context = contextvars.copy_context()
            context.run(ORIGIN.set, call.origin)
        call.task = self._loop.create_task(answering, context=context)
        call.task.add_done_callback(lambda task: self._ended(call, work, task))

    async def _unary(self, call: Call, work: Awaitable[Any]) -> None:
        try:
            reply = await work
            if type(reply) is Parts:
                await self._send_parts(call, reply)
            else:
                await self._room(call)
                self._answer(call, reply)
        except Exception as error:
            self._fail(call, error)
        self._flush()

    async def _send_parts(self, call: Call, reply: Parts) -> None:
        """An answer that is read as the client takes it."""
        try:
            self._check_size(reply.size)
            await self._send_part(call, grpc_framing.prefix(reply.size))
            async for part in reply.content:
                await self._send_part(call, part)
            self._finish(call, Code.OK, "")
        finally:
            await reply.content.aclose()
            reply.close()

    async def _stream(self, call: Call, replies: AsyncGenerator[Any, None]) -> None:
        try:
            async for reply in replies:
                await self._send(call, reply)
            self._finish(call, Code.OK, "")
        except Exception as error:
            self._fail(call, error)
        finally:
            await replies.aclose()
        self._flush()

    def _ended(self, call: Call, work: Any, task: asyncio.Task[None]) -> None:
        """The call's task is done. It may not even have begun, when its connection broke in the
        same breath."""
        # a cancelled task keeps its frames, which know the call and this connection
        call.task = None
        self._server.ended()
        if call.held:
            self._connection.held -= 1
        if not call.streaming:
            work.close()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            codes.report(call.method.name, error)
        if self._calls.get(call.stream_id) is call:
            self._finish(call, Code.CANCELLED, "the call was cancelled")
        self._flush()

    def _answer(self, call: Call, reply: Any) -> None:
        stream_id, connection = call.stream_id, self._connection
        if not connection.is_open(stream_id):
            return
        payload = self._encoded(call, reply)
        connection.send_headers(stream_id, grpc_framing.HEAD_BLOCK)
        connection.send_data(stream_id, grpc_framing.message(payload))
        connection.send_headers(stream_id, grpc_framing.OK_BLOCK, end=True)
        self._answered_bytes += len(payload)
        self._remove(call)

    def _encoded(self, call: Call, reply: Any) -> bytes:
        payload: bytes = reply if type(reply) is bytes else call.method.encode(reply)
        self._check_size(len(payload))
        return payload

    @staticmethod
    def _check_size(size: int) -> None:
        if size > grpc_framing.MESSAGE_LIMIT_BYTES:
            text = f"the answer of {size} bytes is longer than {grpc_framing.MESSAGE_LIMIT_BYTES}"
            raise CallFailed(Code.RESOURCE_EXHAUSTED, text)

    async def _send(self, call: Call, reply: Any) -> None:
        """A message of a stream; returns when the client has taken it."""
        await self._send_part(call, grpc_framing.message(self._encoded(call, reply)))

    async def _send_part(self, call: Call, data: bytes) -> None:
        """A part of the body; returns when the client has taken it."""
        await self._room(call)
        if not self._connection.is_open(call.stream_id):
            raise asyncio.CancelledError
        if not call.started:
            call.started = True
            self._connection.send_headers(call.stream_id, grpc_framing.HEAD_BLOCK)
        call.queued = not self._connection.send_data(call.stream_id, data)
        self._flush()
        if call.queued or self._paused:
            call.waiter = self._loop.create_future()
            await call.waiter

    def _wake(self, call: Call) -> None:
        waiter = call.waiter
        if waiter is not None and not call.queued and not self._paused:
            call.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, call: Call, error: Exception) -> None:
        codes.report(call.method.name, error)
        self._finish(call, codes.code_of(error), codes.message_of(error))

    def _finish(self, call: Call, code: Code, message: str) -> None:
        self._end(call.stream_id, call.started, code, message)
        self._remove(call)

    def _end(self, stream_id: int, started: bool, code: Code, message: str) -> None:
        """Send the status, behind the head of an answer or, if there is none, in it."""
        if self._connection.is_open(stream_id):
            block = grpc_framing.status_block(code, message)
            self._connection.send_headers(
                stream_id, block if started else grpc_framing.HEAD_BLOCK + block, end=True
            )

    # -- calls that end before they are answered

    def _expire(self, call: Call) -> None:
        self._cancel(call, Code.DEADLINE_EXCEEDED, "the deadline has passed")
        self._flush()

    def _cancel(self, call: Call, code: Code, message: str) -> None:
        """Tell the client, then end the task."""
        self._finish(call, code, message)
        self._stop(call)

    def _drop(self, stream_id: int) -> None:
        """The stream is no more."""
        call = self._calls.get(stream_id)
        if call is not None:
            self._remove(call)
            self._stop(call)

    def _drop_calls(self) -> None:
        self._others.clear()
        for stream_id in list(self._calls):
            self._drop(stream_id)

    def _stop(self, call: Call) -> None:
        """What is left of the call counts as an open stream until it has ended."""
        if call.task is not None:
            call.held = True
            self._connection.held += 1
            call.task.cancel()

    def _remove(self, call: Call) -> None:
        self._calls.pop(call.stream_id, None)
        if call.timer is not None:
            call.timer.cancel()
        if call.reserved_bytes:
            self._server.release(call.reserved_bytes)
            call.reserved_bytes = 0

    # -- the server's side

    def drain(self) -> None:
        """Take no more calls; streams that would go on for ever end now, other calls may end by
        themselves."""
        self._connection.go_away()
        for call in list(self._calls.values()):
            if call.streaming or call.task is None:
                self._cancel(call, Code.UNAVAILABLE, "the server is stopping")
        self._flush()

    def stop(self) -> None:
        """End what is left."""
        for call in list(self._calls.values()):
            self._cancel(call, Code.UNAVAILABLE, "the server is stopping")
        self._flush()
        self._leave()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def evict(self) -> None:
        """Make room for a new connection; a gRPC client connects again when it needs to."""
        self._connection.go_away()
        self._write()
        self._leave()
