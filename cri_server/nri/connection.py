"""The ttrpc connection of a plugin: calls to the plugin, and replies to its calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from cri_server.api import ttrpc_pb2 as ttrpc
from cri_server.nri import framing
from cri_server.rpc.codes import Code

log = logging.getLogger(__name__)

PACKAGE = "nri.pkg.api.v1alpha1"
CALLS_LIMIT = 16  # concurrent calls of a plugin

Reply = TypeVar("Reply")


class PluginCallFailed(Exception):
    """The plugin answered the call with a gRPC error status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Closed(Exception):
    """The connection ended before or during the call."""


class PluginConnection(asyncio.Protocol):
    """A connection to a plugin. `serve(method, payload)` answers the plugin's calls of the Runtime
    service, or raises PluginCallFailed. `on_close` is called once, when the connection ends."""

    def __init__(
        self, serve: Callable[[str, bytes], Awaitable[bytes]], on_close: Callable[[], None]
    ) -> None:
        self._serve, self._on_close = serve, on_close
        self._decoder = framing.FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[ttrpc.Response]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._last_stream = -1
        self.open = True

    async def call(self, method: str, request: Any, reply: type[Reply], timeout_s: float) -> Reply:
        """Call `method` of the plugin's Plugin service; return its reply. Raises PluginCallFailed,
        Closed, TimeoutError, framing.TooLarge."""
        self._last_stream += 2  # a client's stream numbers are odd
        stream = self._last_stream
        message = ttrpc.Request(
            service=f"{PACKAGE}.Plugin",
            method=method,
            payload=request.SerializeToString(),
            timeout_nano=int(timeout_s * 1e9),
        )
        answer: asyncio.Future[ttrpc.Response] = asyncio.get_running_loop().create_future()
        self._send(framing.PLUGIN_SERVICE, stream, framing.REQUEST, message.SerializeToString())
        self._waiting[stream] = answer
        try:
            # wait_for() would not do: in Python 3.11 it forgets a cancellation that comes in the
            # same turn as the result (CPython issue 86296).
            async with asyncio.timeout(timeout_s):
                response = await answer
        finally:
            self._waiting.pop(stream, None)
        if response.status.code:
            raise PluginCallFailed(response.status.code, response.status.message)
        try:
            return reply.FromString(response.payload)  # type: ignore[attr-defined, no-any-return]
        except DecodeError as error:
            self.close()
            raise Closed(f"the reply to {method} cannot be decoded: {error}") from None

    def close(self) -> None:
        """Close the connection; waiting calls raise Closed."""
        if self._transport is not None:
            self._transport.abort()
        self._on_end()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # `NriObserver._accepted` may have closed this object already: asyncio needs a protocol even
        # for a refused connection.
        if not self.open:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._received(message)
        except (framing.ProtocolError, DecodeError) as error:
            log.warning("NRI: closing a plugin's connection: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    # -- inside

    def _received(self, message: framing.Message) -> None:
        if (message.connection, message.kind) == (framing.PLUGIN_SERVICE, framing.RESPONSE):
            waiting = self._waiting.get(message.stream)  # None after a timeout
            if waiting is not None and not waiting.done():
                waiting.set_result(ttrpc.Response.FromString(message.payload))
        elif (message.connection, message.kind) == (framing.RUNTIME_SERVICE, framing.REQUEST):
            if len(self._serving) >= CALLS_LIMIT:
                raise framing.ProtocolError(f"more than {CALLS_LIMIT} concurrent calls")
            request = ttrpc.Request.FromString(message.payload)
            task = asyncio.get_running_loop().create_task(self._answer(message.stream, request))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        else:
            raise framing.ProtocolError(
                f"kind {message.kind} on connection {message.connection}: only unary calls are "
                "supported"
            )

    async def _answer(self, stream: int, request: ttrpc.Request) -> None:
        try:
            if request.service != f"{PACKAGE}.Runtime":
                raise PluginCallFailed(Code.UNIMPLEMENTED, f"no service {request.service[:80]!r}")
            response = ttrpc.Response(payload=await self._serve(request.method, request.payload))
        except PluginCallFailed as error:
            response = ttrpc.Response(status=ttrpc.Status(code=error.code, message=error.message))
        except DecodeError as error:
            text = f"{request.method}: the request cannot be decoded: {error}"
            response = ttrpc.Response(status=ttrpc.Status(code=Code.INVALID_ARGUMENT, message=text))
        except Exception:
            log.exception("NRI: %s: unexpected error", request.method)
            response = ttrpc.Response(
                status=ttrpc.Status(code=Code.INTERNAL, message="internal error")
            )
        try:
            self._send(
                framing.RUNTIME_SERVICE, stream, framing.RESPONSE, response.SerializeToString()
            )
        except Closed:
            pass
        except framing.TooLarge as error:
            log.warning("NRI: cannot send the reply to %s: %s", request.method, error)
            self.close()

    def _send(self, connection: int, stream: int, kind: int, payload: bytes) -> None:
        if not self.open or self._transport is None:
            raise Closed("the connection has ended")
        self._transport.write(framing.encode(connection, stream, kind, payload))

    def _on_end(self) -> None:
        if not self.open:
            return
        self.open = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Closed("the connection has ended"))
        for task in self._serving:
            # The current task closes the connection if its reply is too large: it must not cancel
            # itself.
            if task is not asyncio.current_task():
                task.cancel()
        self._on_close()
