"""Serves one gRPC connection: turns bytes of the socket into calls, and replies into bytes.

A call whose handler need not wait is answered in the pass of the event loop that read its request.
Any other call runs as a task. The task is cancelled when the client resets the call, when the
deadline passes, and when the connection or the server ends.

While a client does not read, the server reads nothing from it. While more than `BACKLOG_BYTES` are
unsent, the server computes no further reply for this client: its calls are queued until the client
reads.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType
from typing import Any, cast

from cri_server.http2.connection import Http2Connection
from cri_server.http2.events import Data, Drained, Event, Failed, Opened, PeerReady, Reset
from cri_server.http2.frames import ErrorCode
from cri_server.observability.timeline.trace import ORIGIN
from cri_server.rpc import codes, grpc_framing
from cri_server.rpc.codes import CallFailed, Code
from cri_server.rpc.grpc_framing import IncomingMessage, NotGrpc
from cri_server.rpc.methods import Method, StreamedReply
from cri_server.rpc.shared import Shared
from pyrunc.errors import Error

# A client that opens its windows wide and does not read would make the server buffer every reply
# (CVE-2019-9517).
BACKLOG_BYTES = 4 << 20
FLUSH_S = 5.0  # for a client to read the last replies of a connection that is being closed
SKIPPED_BYTES = 16 << 10  # of a request that is not gRPC; a longer one is answered unread


@dataclass(eq=False, slots=True)
class Call:
    """The state of one call until it is answered."""

    stream_id: int
    method: Method
    incoming: IncomingMessage
    deadline_s: float | None
    origin: str  # the client's traceparent
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    streaming: bool = False
    started: bool = False  # whether the reply's headers were sent
    holds_stream: bool = False  # whether its task counts as an open stream after a reset
    queued: bool = False  # whether a message waits for the client's window
    waiter: asyncio.Future[None] | None = None
    admitted: asyncio.Future[None] | None = None  # set while its reply waits for room
    reserved_bytes: int = 0


class GrpcConnection(asyncio.BufferedProtocol):
    """The asyncio protocol of one gRPC connection.

    - `shared`: the methods, limits and counters of the server.
    - `on_open`, `on_close`: called with this object when the connection opens and closes.
    """

    def __init__(
        self,
        shared: Shared,
        on_open: Callable[[GrpcConnection], None],
        on_close: Callable[[GrpcConnection], None],
    ) -> None:
        self._shared, self._on_open, self._on_close = shared, on_open, on_close
        self._loop = asyncio.get_running_loop()
        self._http = Http2Connection(shared.limits)
        self._calls: dict[int, Call] = {}
        # Requests that are not gRPC, by stream: the HTTP status to answer, the bytes skipped.
        self._non_grpc: dict[int, list[int]] = {}
        self._new_calls: list[Call] = []  # of this pass
        # Calls that wait until the client reads, with the request of those that have not begun.
        self._waiting: deque[tuple[Call, bytes | None]] = deque()
        self._unsent_bytes = 0  # of replies of this pass, which the transport does not have yet
        self._transport: asyncio.Transport | None = None
        self._paused = False
        # Aborts a connection whose client sends no preface, or later does not read the last
        # replies.
        self._close_timer: asyncio.TimerHandle | None = None
        self.active_s = self._loop.time()  # when it last received data
        self.has_called = False  # whether it has ever made a call

    @property
    def idle(self) -> bool:
        """Return whether no call is open."""
        return not self._calls and not self._http.unfinished_streams

    @property
    def busy(self) -> bool:
        """Return whether a call is running or waiting. An incomplete request does not count."""
        begun = any(call.task is not None for call in self._calls.values())
        return begun or bool(self._waiting) or self._http.unfinished_streams > 0

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._close_timer = self._loop.call_later(self._shared.greeting_s, self._transport.abort)
        self._flush()
        self._on_open(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._cancel_timeout()
        self._http.lose()
        self._discard_calls()
        self._waiting.clear()
        self._on_close(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.buffer

    def buffer_updated(self, size: int) -> None:
        self.active_s = self._loop.time()
        # The bytes are copied, because all connections of the server share the buffer.
        for event in self._http.receive(bytes(self._shared.buffer[:size])):
            self._handle_event(event)
        if self._new_calls:
            self._start_deadlines()
        self._flush()

    def pause_writing(self) -> None:
        self._paused = True
        # Reading stops, too: each request that is read would add a reply to those that wait.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        for call in list(self._calls.values()):
            self._wake(call)
        if self._waiting:
            self._flush()

    def _flush(self) -> None:
        """Write pending frames, then dispatch waiting calls. Stops when the client must
        read replies first (`_is_backlogged`)."""
        self._write()
        while self._waiting and not self._is_backlogged():
            call, payload = self._waiting.popleft()
            if payload is None:
                if call.admitted is not None and not call.admitted.done():
                    call.admitted.set_result(None)
                    break  # its task flushes again once the reply is sent
            elif self._calls.get(call.stream_id) is call:
                self._dispatch(call, payload)
                self._write()
        if self._http.leaving and self.idle and not self._http.queued_bytes:
            self._close_when_flushed()

    def _write(self) -> None:
        data, transport = self._http.data_to_send(), self._transport
        self._unsent_bytes = 0
        if data and transport is not None and not transport.is_closing():
            transport.write(data)

    def _is_backlogged(self) -> bool:
        """Return whether the client has to read before it gets another reply."""
        return self._paused or self._http.queued_bytes + self._unsent_bytes > BACKLOG_BYTES

    async def _wait_for_room(self, call: Call) -> None:
        """Wait until the client has read enough of earlier replies for the next one to be sent."""
        # The connection is not closed instead: kubelet makes all its runtime calls on one
        # connection, and two dozen large outputs of ExecSync would cut off all these calls.
        while self._is_backlogged():
            call.admitted = self._loop.create_future()
            self._waiting.append((call, None))
            try:
                await call.admitted
            finally:
                call.admitted = None

    def _close_when_flushed(self) -> None:
        """Close the connection once the client has read all written data, or after `FLUSH_S`."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._cancel_timeout()
            self._close_timer = self._loop.call_later(FLUSH_S, transport.abort)
            transport.close()

    # -- the connection's events

    def _handle_event(self, event: Event) -> None:
        if type(event) is Data:
            call = self._calls.get(event.stream_id)
            if call is not None:
                self._on_data(call, event.data, event.ended)
            elif event.stream_id in self._non_grpc:
                self._on_non_grpc_data(event.stream_id, len(event.data), event.ended)
        elif type(event) is Opened:
            self._on_request(event)
        elif type(event) is Reset:
            self._http.unfinished_streams -= 1
            self._non_grpc.pop(event.stream_id, None)
            self._discard(event.stream_id)
        elif type(event) is Drained:
            call = self._calls.get(event.stream_id)
            if call is not None:
                call.queued = False
                self._wake(call)
        elif type(event) is PeerReady:
            self._cancel_timeout()
        elif type(event) is Failed:
            code = ErrorCode(event.code).name
            self._shared.warn(code, f"closing a client's connection: {code}: {event.reason}")
            self._flush()
            self._discard_calls()
            self._close_when_flushed()

    def _cancel_timeout(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None

    # -- requests

    def _on_request(self, event: Opened) -> None:
        if not self._http.is_open(event.stream_id):
            return  # reset in the same pass
        if event.fields is None:
            # Not HTTP's status 431: gRPC clients map it to UNKNOWN (http-grpc-status-mapping.md),
            # but show a gRPC status.
            limit = self._shared.limits.header_list_bytes
            self._send_status(
                event.stream_id,
                False,
                Code.RESOURCE_EXHAUSTED,
                f"the headers exceed {limit} bytes",
            )
            return
        try:
            head = grpc_framing.parse_head(event.fields)
            method = self._shared.methods.get(head.path)
            if method is None:
                path = head.path[:200].decode("utf-8", "replace")
                raise CallFailed(Code.UNIMPLEMENTED, f"unknown method {path}")
        except NotGrpc as other:
            self._non_grpc[event.stream_id] = [other.http_status, 0]
            self._on_non_grpc_data(event.stream_id, 0, event.ended)
            return
        except CallFailed as failed:
            self._send_status(event.stream_id, False, failed.code, failed.message)
            return
        deadline_s = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        call = Call(
            event.stream_id, method, IncomingMessage(head.encoding), deadline_s, head.origin
        )
        self._calls[event.stream_id] = call
        self.has_called = True
        self._new_calls.append(call)
        if event.ended:
            self._on_data(call, b"", True)

    def _on_non_grpc_data(self, stream_id: int, size: int, ended: bool) -> None:
        """Count and skip `size` bytes of a request that is not gRPC. Answer with the HTTP status at
        the request's end, or earlier when more than `SKIPPED_BYTES` have come (RFC 9113, section
        8.1)."""
        state = self._non_grpc[stream_id]
        state[1] += size
        if not ended and state[1] <= SKIPPED_BYTES:
            return
        del self._non_grpc[stream_id]
        if self._http.is_open(stream_id):
            block, body = grpc_framing.not_grpc_reply(state[0])
            self._http.send_headers(stream_id, block)
            self._http.send_data(stream_id, body)
            self._http.send_headers(stream_id, b"", end=True)

    def _on_data(self, call: Call, data: bytes, ended: bool) -> None:
        if call.task is not None or not self._http.is_open(call.stream_id):
            return
        if ended and call.incoming.length is None:
            # Nearly every request is one DATA frame with one message, which needs no buffer.
            payload = grpc_framing.whole_message(data)
            if payload is not None:
                self._dispatch(call, payload)
                return
        try:
            credit = call.incoming.add(data)
            if credit:
                self._reserve(call, call.incoming.length or 0)
                self._http.credit(call.stream_id, credit)
            if not ended:
                # Requests within the first window count, too: 64 KiB for each stream of each
                # connection add up.
                self._reserve(call, call.incoming.received)
            if ended:
                self._dispatch(call, call.incoming.finish())
        except CallFailed as failed:
            self._fail(call, failed)

    def _reserve(self, call: Call, size: int) -> None:
        """Reserve memory for a request that arrives in several pieces, `size` bytes in total.
        Raises CallFailed when the large requests of all clients would exceed the server's limit."""
        more = max(0, size - call.reserved_bytes)
        if not self._shared.reserve(more):
            raise CallFailed(Code.RESOURCE_EXHAUSTED, "too many large requests at once")
        call.reserved_bytes += more

    def _start_deadlines(self) -> None:
        """Start a timer for each call that has a deadline, has begun in this pass of the event
        loop, and is still unanswered."""
        # Timers start at the end of the pass, because most calls are answered within it and need
        # none.
        for call in self._new_calls:
            if call.deadline_s is not None and self._calls.get(call.stream_id) is call:
                call.timer = self._loop.call_at(call.deadline_s, self._on_deadline, call)
        self._new_calls.clear()

    # -- answers

    def _dispatch(self, call: Call, payload: bytes) -> None:
        """Decode the request and call its handler. Sends the reply that the handler returns, or
        starts a task for its coroutine or generator. While the client does not read, the call is
        queued instead."""
        if self._is_backlogged():
            self._waiting.append((call, payload))
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
            reply = method.answer(request)
            if type(reply) in (CoroutineType, AsyncGeneratorType):
                self._start_task(call, reply)
            else:
                self._answer(call, reply)
        except Exception as error:
            self._fail(call, error)

    def _start_task(self, call: Call, work: Any) -> None:
        """Run a handler's coroutine or async generator in a task. Raises CallFailed when the server
        has too many tasks."""
        call.streaming = type(work) is AsyncGeneratorType
        if not self._shared.admit_task():
            # A coroutine that is dropped unawaited logs a RuntimeWarning; an async generator does
            # not.
            if not call.streaming:
                work.close()
            raise CallFailed(Code.RESOURCE_EXHAUSTED, "too many calls at once")
        reply = self._stream(call, work) if call.streaming else self._unary(call, work)
        # The traceparent is set in a copy: tasks of later calls copy the context of this protocol's
        # callback.
        context = None
        if call.origin:
            context = contextvars.copy_context()
            context.run(ORIGIN.set, call.origin)
        call.task = self._loop.create_task(reply, context=context)
        call.task.add_done_callback(lambda task: self._on_task_done(call, work, task))

    async def _unary(self, call: Call, work: Awaitable[Any]) -> None:
        try:
            reply = await work
            if type(reply) is StreamedReply:
                await self._send_streamed(call, reply)
            else:
                await self._wait_for_room(call)
                self._answer(call, reply)
        except Exception as error:
            self._fail(call, error)
        self._flush()

    async def _send_streamed(self, call: Call, reply: StreamedReply) -> None:
        """Send a reply part by part, as fast as the client reads."""
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
                await self._send_part(call, grpc_framing.message(self._encoded(call, reply)))
            self._finish(call, Code.OK, "")
        except Exception as error:
            self._fail(call, error)
        finally:
            await replies.aclose()
        self._flush()

    def _on_task_done(self, call: Call, work: Any, task: asyncio.Task[None]) -> None:
        """Clean up after the call's task, even if the task was cancelled before it began."""
        # A cancelled task keeps its frames, which refer to the call and this connection.
        call.task = None
        self._shared.on_task_done()
        if call.holds_stream:
            self._http.unfinished_streams -= 1
        if not call.streaming:
            work.close()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            codes.report(call.method.name, error)
        if self._calls.get(call.stream_id) is call:
            self._finish(call, Code.CANCELLED, "the call was cancelled")
        self._flush()

    def _answer(self, call: Call, reply: Any) -> None:
        stream_id, connection = call.stream_id, self._http
        if not connection.is_open(stream_id):
            return
        payload = self._encoded(call, reply)
        connection.send_headers(stream_id, grpc_framing.HEAD_BLOCK)
        connection.send_data(stream_id, grpc_framing.message(payload))
        connection.send_headers(stream_id, grpc_framing.OK_BLOCK, end=True)
        self._unsent_bytes += len(payload)
        self._remove(call)

    def _encoded(self, call: Call, reply: Any) -> bytes:
        payload: bytes = reply if type(reply) is bytes else call.method.encode(reply)
        self._check_size(len(payload))
        return payload

    @staticmethod
    def _check_size(size: int) -> None:
        if size > grpc_framing.MESSAGE_LIMIT_BYTES:
            text = f"the reply of {size} bytes exceeds {grpc_framing.MESSAGE_LIMIT_BYTES} bytes"
            raise CallFailed(Code.RESOURCE_EXHAUSTED, text)

    async def _send_part(self, call: Call, data: bytes) -> None:
        """Send a part of the reply's body. Return when the client's flow-control window has had
        room for all of it."""
        await self._wait_for_room(call)
        if not self._http.is_open(call.stream_id):
            # The client has reset the stream: the producer ends as if its task was cancelled.
            raise asyncio.CancelledError
        if not call.started:
            call.started = True
            self._http.send_headers(call.stream_id, grpc_framing.HEAD_BLOCK)
        call.queued = not self._http.send_data(call.stream_id, data)
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
        self._send_status(call.stream_id, call.started, code, message)
        self._remove(call)

    def _send_status(self, stream_id: int, started: bool, code: Code, message: str) -> None:
        """Send the status: in trailers, or in the only header block when no headers were sent."""
        if self._http.is_open(stream_id):
            # Without a message the status goes into the only header block (Trailers-Only in
            # PROTOCOL-HTTP2.md).
            block = grpc_framing.status_block(code, message)
            self._http.send_headers(
                stream_id, block if started else grpc_framing.HEAD_BLOCK + block, end=True
            )

    # -- calls that end without a reply

    def _on_deadline(self, call: Call) -> None:
        self._cancel(call, Code.DEADLINE_EXCEEDED, "the deadline has passed")
        self._flush()

    def _cancel(self, call: Call, code: Code, message: str) -> None:
        """Send the status to the client, then cancel the call's task."""
        self._finish(call, code, message)
        self._cancel_task(call)

    def _discard(self, stream_id: int) -> None:
        """Forget the call of a stream that was reset, and cancel its task."""
        call = self._calls.get(stream_id)
        if call is not None:
            self._remove(call)
            self._cancel_task(call)

    def _discard_calls(self) -> None:
        self._non_grpc.clear()
        for stream_id in list(self._calls):
            self._discard(stream_id)

    def _cancel_task(self, call: Call) -> None:
        """Cancel the call's task. Until the task has ended, it counts as an open stream of the
        client."""
        if call.task is not None:
            # A cancelled handler may run on for long, in a step that cannot be interrupted or in
            # its undo.
            call.holds_stream = True
            self._http.unfinished_streams += 1
            call.task.cancel()

    def _remove(self, call: Call) -> None:
        self._calls.pop(call.stream_id, None)
        if call.timer is not None:
            call.timer.cancel()
        if call.reserved_bytes:
            self._shared.release(call.reserved_bytes)
            call.reserved_bytes = 0

    # -- the server's side

    def drain(self) -> None:
        """Refuse new calls, and let running calls finish. Cancels calls that have not begun to run,
        and streaming calls, because these may be endless."""
        self._http.go_away()
        for call in list(self._calls.values()):
            if call.streaming or call.task is None:
                self._cancel(call, Code.UNAVAILABLE, "the server is stopping")
        self._flush()

    def stop(self) -> None:
        """Cancel all calls and close the connection."""
        for call in list(self._calls.values()):
            self._cancel(call, Code.UNAVAILABLE, "the server is stopping")
        self._flush()
        self._close_when_flushed()

    def abort(self) -> None:
        """Close the connection without flushing."""
        if self._transport is not None:
            self._transport.abort()

    def evict(self) -> None:
        """Close this connection so that the server can accept a new one. A gRPC client reconnects
        when needed."""
        self._http.go_away()
        self._write()
        self._close_when_flushed()
