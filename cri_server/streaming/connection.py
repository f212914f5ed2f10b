"""Serves one connection of the streaming server: reads the HTTP request within a deadline, redeems
its ticket, switches to SPDY or WebSocket, and runs the session.

One task runs the session, another reads the connection. When reading ends, because the client has
disconnected or violated the protocol, the session is cancelled and closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from cri_server.streaming import portforward, remotecommand, upgrade
from cri_server.streaming.backend import (
    AttachOptions,
    Backend,
    ExecSessionOptions,
    PortForwardOptions,
    StreamingSession,
)
from cri_server.streaming.multiplex import MultiplexedStream, Multiplexer
from cri_server.streaming.remotecommand import CommandStreams
from cri_server.streaming.spdy.frames import Status
from cri_server.streaming.streams import Inbound, StreamGone
from cri_server.streaming.tokens import Tickets
from cri_server.streaming.transport import ConnectionLost, SocketTransport, Transport
from cri_server.streaming.upgrade import Refused, RequestReader, UpgradeRequest
from cri_server.streaming.websocket import DIALECTS, TUNNEL, Channels, Messages

log = logging.getLogger(__name__)

# v3 added resizing, v4 the Status object, v5 (WebSocket only) closing a channel.
COMMAND_PROTOCOLS = (
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
)
FORWARD_SUBPROTOCOLS = ("v4.channel.k8s.io", "v4.base64.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)

# How long a client that sends nothing may hold a connection; any local user can connect.
REQUEST_S = 10.0
STREAMS_S = 30.0  # the timeout of Kubernetes' streaming library for the creation of streams


class Connections:
    """Serves the connections of one streaming server.

    `sessions`: the number of open sessions by kind: `exec`, `attach` and `portforward`. `on_ticket`
    is called in the task of a connection after its ticket was redeemed.
    """

    def __init__(
        self,
        backend: Backend,
        tickets: Tickets,
        sessions: Counter[str],
        on_ticket: Callable[[], None],
    ) -> None:
        self._backend, self._tickets, self._sessions = backend, tickets, sessions
        self._on_ticket = on_ticket
        self.forward_limits = portforward.ForwardLimits()

    async def serve(self, sock: socket.socket) -> None:
        """Serve the session of one connection, then close the connection."""
        transport = SocketTransport(sock)
        try:
            session = await self._open(transport)
            if session is not None:
                request, options = session
                await self._serve(request, options, transport)
            await transport.close()
        except (ConnectionLost, StreamGone):
            pass
        except Exception:
            log.exception("streaming: unexpected error in a session")
        finally:
            transport.abort()

    async def _open(self, transport: SocketTransport) -> tuple[UpgradeRequest, object] | None:
        """Read the request within `REQUEST_S` and redeem its ticket. Return the request and the
        session's options. If the request is refused, send the refusal and return None."""
        try:
            try:
                async with asyncio.timeout(REQUEST_S):
                    request = await self._read_request(transport)
            except TimeoutError:
                raise Refused(408, "the request took too long") from None
            options = self._redeem(request)
        except Refused as refused:
            await transport.send(refused.response())
            return None
        self._on_ticket()
        return request, options

    async def _read_request(self, transport: SocketTransport) -> UpgradeRequest:
        reader = RequestReader()
        while data := await transport.receive():
            request = reader.receive(bytes(data))
            if request is not None:
                transport.unread(request.ahead)
                return request
        raise ConnectionLost("the client disconnected within its request")

    def _redeem(self, request: UpgradeRequest) -> object:
        """Redeem the URL's ticket; return the options of its session. Raises Refused."""
        # SPDY clients of Kubernetes send POST; WebSocket requires GET (RFC 6455, section 4.1).
        if request.method not in ("GET", "POST"):
            raise Refused(405, "the method must be GET or POST", [("Allow", "GET, POST")])
        parts = request.path.split("/")
        is_ticket = len(parts) == 3 and not parts[0]
        options = self._tickets.take(parts[1], parts[2]) if is_ticket else None
        if options is None:
            raise Refused(404, "no such session")
        return options

    async def _serve(
        self, request: UpgradeRequest, options: object, transport: SocketTransport
    ) -> None:
        kind = request.path.split("/")[1]
        self._sessions[kind] += 1
        try:
            if request.upgrade == "spdy/3.1":
                serving = self._over_spdy(request, options, transport)
            elif request.upgrade == "websocket":
                serving = self._over_websocket(request, options, transport)
            else:
                raise Refused(
                    400,
                    "the request must upgrade to SPDY/3.1 or websocket",
                    [("Upgrade", "SPDY/3.1")],
                )
            await serving
        except Refused as refused:
            await transport.send(refused.response())
        finally:
            self._sessions[kind] -= 1

    # ---- SPDY ----

    async def _over_spdy(
        self, request: UpgradeRequest, options: object, transport: SocketTransport
    ) -> None:
        if isinstance(options, PortForwardOptions):
            protocol = upgrade.choose_stream_protocol(request, (portforward.PROTOCOL,))
            await transport.send(upgrade.switch_to_spdy(protocol))
            await self._forward_over_spdy(options, transport)
            return
        assert isinstance(options, ExecSessionOptions | AttachOptions)
        protocol = upgrade.choose_stream_protocol(request, COMMAND_PROTOCOLS)
        await transport.send(upgrade.switch_to_spdy(protocol))
        collector = _StreamCollector(_roles(options), resizable=options.tty)
        multiplexer = Multiplexer(transport, collector.on_open, streams_limit=2 * RESIZE)
        await _while_connected(
            multiplexer.run(), self._command_over_spdy(options, protocol, collector)
        )
        multiplexer.leave()

    async def _command_over_spdy(
        self,
        options: ExecSessionOptions | AttachOptions,
        protocol: str,
        collector: _StreamCollector,
    ) -> None:
        streams = await collector.collect()
        if streams is None:
            return
        await remotecommand.run(
            self._session(options),
            CommandStreams(
                error=streams["error"],
                json_status=protocol == COMMAND_PROTOCOLS[0],
                stdin=streams["stdin"].inbound if "stdin" in streams else None,
                stdout=streams.get("stdout"),
                stderr=streams.get("stderr"),
                resize=collector.resize if options.tty else None,
            ),
        )

    async def _forward_over_spdy(self, options: PortForwardOptions, transport: Transport) -> None:
        forwarder = portforward.Forwarder(self._backend, options.sandbox_id, self.forward_limits)
        multiplexer = Multiplexer(transport, forwarder.on_open)
        try:
            await multiplexer.run()
        finally:
            await forwarder.close()

    # ---- WebSocket ----

    async def _over_websocket(
        self, request: UpgradeRequest, options: object, transport: SocketTransport
    ) -> None:
        if isinstance(options, PortForwardOptions):
            await self._forward_over_websocket(request, options, transport)
            return
        assert isinstance(options, ExecSessionOptions | AttachOptions)
        subprotocol = upgrade.choose_subprotocol(request, tuple(DIALECTS))
        await transport.send(upgrade.switch_to_websocket(request, subprotocol))
        messages = Messages(transport)
        channels = Channels(messages, DIALECTS[subprotocol])
        streams = _channel_streams(options, channels, DIALECTS[subprotocol].json_status)
        # Clients wait for a first, empty message on the lowest channel that the server writes.
        await (streams.stdout or streams.stderr or streams.error).write(b"")
        await _while_connected(channels.run(), remotecommand.run(self._session(options), streams))
        messages.leave()

    async def _forward_over_websocket(
        self, request: UpgradeRequest, options: PortForwardOptions, transport: SocketTransport
    ) -> None:
        subprotocol = upgrade.choose_subprotocol(request, (TUNNEL, *FORWARD_SUBPROTOCOLS))
        if subprotocol != TUNNEL and not options.ports:
            raise Refused(400, "WebSocket port forwarding needs ports in the PortForwardRequest")
        if subprotocol != TUNNEL and len(options.ports) > portforward.CHANNEL_PORTS_LIMIT:
            limit = portforward.CHANNEL_PORTS_LIMIT
            raise Refused(
                400,
                f"{len(options.ports)} ports: the limit of a WebSocket is {limit}",
            )
        await transport.send(upgrade.switch_to_websocket(request, subprotocol))
        messages = Messages(transport)
        if subprotocol == TUNNEL:
            await self._forward_over_spdy(options, messages)
        else:
            channels = Channels(messages, DIALECTS[subprotocol])
            pairs = [
                (channels.channel(2 * index), channels.channel(2 * index + 1))
                for index in range(len(options.ports))
            ]
            forwarding = portforward.forward_channels(
                self._backend, options.sandbox_id, self.forward_limits, options.ports, pairs
            )
            await _while_connected(channels.run(), forwarding)
        messages.leave()

    def _session(self, options: ExecSessionOptions | AttachOptions) -> Awaitable[StreamingSession]:
        if isinstance(options, ExecSessionOptions):
            return self._backend.exec(options)
        return self._backend.attach(options)


def _resolved(inbound: Inbound) -> asyncio.Future[Inbound]:
    future: asyncio.Future[Inbound] = asyncio.get_running_loop().create_future()
    future.set_result(inbound)
    return future


class _StreamCollector:
    """Waits until a SPDY client has opened the streams of an exec or attach, and resets all other
    streams.

    It accepts a `resize` stream but does not wait for it: a client that attaches may not know that
    the container has a terminal.
    """

    def __init__(self, roles: Sequence[str], *, resizable: bool) -> None:
        self._missing = set(roles)
        self._resizable = resizable
        self.resize: asyncio.Future[Inbound] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, MultiplexedStream] = {}
        self._complete = asyncio.Event()

    def on_open(self, stream: MultiplexedStream) -> None:
        """Accept or reset a stream that the client has opened."""
        role = stream.header("streamtype")
        if role == "resize" and self._resizable and not self.resize.done():
            self.resize.set_result(stream.inbound)
            return
        if role not in self._missing:
            stream.reset(Status.PROTOCOL_ERROR)
            return
        self._missing.remove(role)
        self._streams[role] = stream
        # Data that a client sends on an output stream would fill the budget, and stop its stdin.
        if role != "stdin":
            stream.inbound.discard()
        if not self._missing:
            self._complete.set()

    async def collect(self) -> dict[str, MultiplexedStream] | None:
        """Wait until the client has opened all streams; return them by role. Return None if that
        takes longer than `STREAMS_S`."""
        try:
            async with asyncio.timeout(STREAMS_S):
                await self._complete.wait()
        except TimeoutError:
            log.info(
                "streaming: the client opened no stream for %s", ", ".join(sorted(self._missing))
            )
            return None
        return self._streams


def _roles(options: ExecSessionOptions | AttachOptions) -> list[str]:
    return ["error", *(role for role in ("stdin", "stdout", "stderr") if getattr(options, role))]


def _channel_streams(
    options: ExecSessionOptions | AttachOptions, channels: Channels, json_status: bool
) -> CommandStreams:
    return CommandStreams(
        error=channels.channel(ERROR),
        json_status=json_status,
        stdin=channels.channel(STDIN).inbound if options.stdin else None,
        stdout=channels.channel(STDOUT) if options.stdout else None,
        stderr=channels.channel(STDERR) if options.stderr else None,
        resize=_resolved(channels.channel(RESIZE).inbound) if options.tty else None,
    )


async def _while_connected(
    reading: Coroutine[Any, Any, str], serving: Coroutine[Any, Any, None]
) -> None:
    """Run `reading` and `serving` until one of them ends, then cancel the other. Raises the error
    of `reading` or, if it has none, that of `serving`."""
    tasks = (asyncio.create_task(reading), asyncio.create_task(serving))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    try:
        for result in results:
            if isinstance(result, Exception):
                raise result
    finally:
        del tasks, results, result  # the error's traceback refers to this frame
