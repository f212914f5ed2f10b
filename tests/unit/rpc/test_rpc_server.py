"""Tests the gRPC server on its socket: with gRPC clients, and with clients that stall, flood or
disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import gzip
import logging
import socket
import struct
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import hpack
import pytest

from cri_server.http2 import frames
from cri_server.http2.frames import END_HEADERS, END_STREAM, ErrorCode, head
from cri_server.http2.limits import Http2Limits
from cri_server.rpc import codes, grpc_framing, shared
from cri_server.rpc import server as server_module
from cri_server.rpc.codes import UnknownCall
from cri_server.rpc.connection import BACKLOG_BYTES
from cri_server.rpc.methods import Method, StreamedReply
from cri_server.rpc.server import Server
from pyrunc.errors import Error, KernelError, NotFound, PeerError, Unsupported, WrongState

LARGE = ("large", "large_later", "large_parts")
HELLO = frames.PREFACE + frames.settings({})
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


class CountedReply:
    """A reply that is counted when it is encoded."""

    def __init__(self, request: bytes, calls: Calls) -> None:
        self._size, self._calls = int(request), calls

    def __bytes__(self) -> bytes:
        self._calls.encoded += 1
        return b"x" * self._size


class Calls:
    """The handlers of the tested server, of each kind: plain functions, coroutines and streams."""

    def __init__(self) -> None:
        # `ended` counts calls whose work was done or cancelled.
        self.started, self.ended, self.encoded = 0, 0, 0
        self.gate = asyncio.Event()

    def echo(self, request: bytes) -> bytes:
        return request

    async def later(self, request: bytes) -> bytes:
        await asyncio.sleep(0.01)
        return request

    async def wait(self, request: bytes) -> bytes:
        self.started += 1
        try:
            await self.gate.wait()
        finally:
            self.ended += 1
        return request

    def fail(self, request: bytes) -> bytes:
        raise NotFound("no such thing: ü%\n")

    async def fail_later(self, request: bytes) -> bytes:
        raise ZeroDivisionError("a bug")

    async def count(self, request: bytes) -> AsyncIterator[bytes]:
        self.started += 1
        try:
            for number in range(int(request)):
                yield b"%d" % number
        finally:
            self.ended += 1

    async def flood(self, request: bytes) -> AsyncIterator[bytes]:
        self.started += 1
        try:
            while True:
                self.sent = getattr(self, "sent", 0) + 1
                yield b"x" * int(request)
        finally:
            self.ended += 1

    async def fail_midway(self, request: bytes) -> AsyncIterator[bytes]:
        yield b"one"
        raise NotFound("gone")

    def large(self, request: bytes) -> bytes:
        self.encoded += 1
        return b"x" * int(request)

    async def large_later(self, request: bytes) -> bytes:
        await asyncio.sleep(0.01)
        return CountedReply(request, self)  # type: ignore[return-value]

    async def large_parts(self, request: bytes) -> StreamedReply:
        self.started += 1

        async def content() -> AsyncGenerator[bytes, None]:
            for _ in range(0, int(request), 1 << 16):
                yield b"x" * (1 << 16)
            self.encoded += 1

        def close() -> None:
            self.ended += 1

        return StreamedReply((int(request) + 0xFFFF) >> 16 << 16, content(), close)

    def table(self) -> dict[bytes, Method]:
        names = [n for n in vars(Calls) if not n.startswith("_") and n != "table"]
        return {f"/t.T/{n}".encode(): Method(n, bytes, getattr(self, n), bytes) for n in names}


class World:
    """A server with the handlers of `Calls`, and a gRPC channel to it."""

    def __init__(self, folder: Path, limits: Http2Limits | None, greeting_s: float) -> None:
        self.calls = Calls()
        self.path = folder / "s.sock"
        self.server = Server(self.path, self.calls.table(), limits=limits, greeting_s=greeting_s)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=options)

    async def __aenter__(self) -> World:
        await self.server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close(None)
        await self.server.stop(0.2)
        assert not self.path.exists()

    async def call(self, name: str, request: bytes = b"", **options: Any) -> bytes:
        return bytes(await self.unary(name)(request, **options))

    def unary(self, name: str) -> Any:
        return self.channel.unary_unary(f"/t.T/{name}", bytes, bytes)

    def stream(self, name: str, request: bytes) -> Any:
        return self.channel.unary_stream(f"/t.T/{name}", bytes, bytes)(request)


@pytest.fixture
def open_world(tmp_path: Path) -> Any:
    """Return a function that makes a `World` with the given limits."""

    def make(*, greeting_s: float = 10.0, **limits: Any) -> World:
        return World(tmp_path, replace(Http2Limits(), **limits), greeting_s)

    return make


@pytest.fixture
async def world(open_world: Any) -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


async def code_of(call: Any) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), failed.value.details()


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


# ---- as gRPC clients see it


async def test_calls_are_answered_at_once_and_later(world: World) -> None:
    assert await world.call("echo", b"at once") == b"at once"
    assert await world.call("later", b"in a while") == b"in a while"
    answers = await asyncio.gather(
        *(world.call("later" if n % 2 else "echo", b"%d" % n) for n in range(500))
    )
    assert answers == [b"%d" % n for n in range(500)]
    assert [bytes(m) async for m in world.stream("count", b"1000")] == [
        b"%d" % n for n in range(1000)
    ]
    assert [m async for m in world.stream("count", b"0")] == []


@pytest.mark.requirement("1.3")
@pytest.mark.parametrize("size", [65530, 65531, 16 << 20, 32 << 20])
async def test_large_messages_pass(world: World, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert await world.call("echo", body) == body


async def test_messages_that_are_too_large_are_refused(world: World) -> None:
    limit = grpc_framing.MESSAGE_LIMIT_BYTES
    code, text = await code_of(world.call("echo", b"x" * (limit + 1)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and str(limit) in str(text)
    code, _ = await code_of(world.call("large", b"%d" % (limit + 1)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(await world.call("large", b"%d" % limit)) == limit


@pytest.mark.requirement("1.10", "1.a.9")
async def test_errors_have_their_code_and_message(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert await code_of(world.call("fail")) == (grpc.StatusCode.NOT_FOUND, "no such thing: ü%\n")
    assert (await code_of(world.call("nothing")))[0] == grpc.StatusCode.UNIMPLEMENTED
    assert "Traceback" not in caplog.text
    code, text = await code_of(world.call("fail_later"))
    assert (
        code == grpc.StatusCode.INTERNAL
        and text == "ZeroDivisionError: a bug"
        and "Traceback" in caplog.text
    )
    stream = world.stream("fail_midway", b"")
    assert await stream.read() == b"one"
    assert await code_of(stream.read()) == (grpc.StatusCode.NOT_FOUND, "gone")


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (Unsupported("cannot set cpu.weight"), True),
        (KernelError("mount", "'x'", errno.EPERM), True),
        (PeerError("a plugin said no"), True),
        (NotFound("no such container"), False),
        (WrongState("it has exited"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_of_the_node_is_logged_once(
    caplog: pytest.LogCaptureFixture, error: Error, logged: bool
) -> None:
    caplog.set_level(logging.INFO)
    codes.report("ContainerStatus", error)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == (
        [("WARNING", f"ContainerStatus: {error.kind}: {error.message}")] if logged else []
    )
    caplog.clear()
    error.has_line = True  # type: ignore[attr-defined]
    codes.report("ContainerStatus", error)
    codes.report("NewCall", UnknownCall("NewCall"))
    assert not caplog.records


async def test_gzip_messages_are_accepted(world: World) -> None:
    call = world.unary("echo")
    assert await call(b"x" * 10_000, compression=grpc.Compression.Gzip) == b"x" * 10_000
    code, _ = await code_of(call(b"x" * 10_000, compression=grpc.Compression.Deflate))
    assert code == grpc.StatusCode.UNIMPLEMENTED


async def test_calls_end_at_their_deadline(world: World) -> None:
    assert (await code_of(world.call("wait", timeout=0.1)))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: world.calls.ended == 1)
    stream = world.channel.unary_stream("/t.T/flood", bytes, bytes)(b"10", timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in stream:
            pass
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: world.calls.ended == 2)


async def test_cancelled_calls_end_their_work(world: World) -> None:
    calls = [world.unary("wait")(b"") for _ in range(50)]
    await until(lambda: world.calls.started == 50)
    for call in calls:
        call.cancel()
    await until(lambda: world.calls.ended == 50)
    stream = world.stream("flood", b"1000")
    await stream.read()
    stream.cancel()
    await until(lambda: world.calls.ended == 51)
    assert await world.call("echo", b"still") == b"still"
    await until(lambda: world.server.calls == 0)


async def test_a_slow_reader_pauses_only_its_own_stream(world: World) -> None:
    # With the probe the client enlarges its window by its measurements, up to 70 MB.
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"unix:{world.path}", options=options) as channel:
        stream = channel.unary_stream("/t.T/flood", bytes, bytes)(b"10000")
        await stream.read()
        sent = -1
        while world.calls.sent != sent:
            sent = world.calls.sent
            await asyncio.sleep(0.2)
        assert sent * 10_000 < 1 << 20
        assert await channel.unary_unary("/t.T/echo", bytes, bytes)(b"others") == b"others"
        for _ in range(sent):
            await stream.read()
        await until(lambda: world.calls.sent > sent)
        stream.cancel()


async def test_a_stopping_server_lets_calls_finish_and_ends_streams(open_world: Any) -> None:
    async with open_world() as world:
        waiting = asyncio.ensure_future(world.call("wait", b"w"))
        stream = world.stream("flood", b"10")
        await stream.read()
        await until(lambda: world.calls.started == 2)
        stopping = asyncio.create_task(world.server.stop(120))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            while True:
                await stream.read()
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        world.calls.gate.set()
        assert await waiting == b"w"
        await asyncio.wait_for(stopping, 60)


async def test_a_stopping_server_waits_for_calls_up_to_a_limit(open_world: Any) -> None:
    async with open_world() as world:
        waiting = asyncio.ensure_future(world.call("wait"))
        await until(lambda: world.calls.started == 1)
        await asyncio.wait_for(world.server.stop(0.1), 60)
        assert (await code_of(waiting))[0] == grpc.StatusCode.UNAVAILABLE
        await until(lambda: world.calls.ended == 1)


@pytest.mark.requirement("1.4", "14.6")
async def test_a_second_server_does_not_take_the_socket(world: World, tmp_path: Path) -> None:
    with pytest.raises(WrongState):
        await Server(world.path, {}).start()
    assert world.path.stat().st_mode & 0o777 == 0o660
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    other = Server(stale, world.calls.table())
    await other.start()
    await other.stop(1)


# ---- as others see it


class Raw(asyncio.Protocol):
    """A client that sends and receives the bytes of frames."""

    def __init__(self, world: World) -> None:
        self._path = world.path
        self.encoder = hpack.Encoder()
        self.received = bytearray()
        self.lost, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()

    async def __aenter__(self) -> Raw:
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_unix_connection(lambda: self, str(self._path))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.transport.abort()
        await self.lost.wait()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def head(self, stream_id: int, name: str, *more: tuple[str, str]) -> bytes:
        """Return the HEADERS frame of a call."""
        block = self.encoder.encode([*FIELDS[:3], (":path", f"/t.T/{name}"), *FIELDS[3:], *more])
        return head(len(block), frames.HEADERS, END_HEADERS, stream_id) + block

    def call(self, stream_id: int, name: str, body: bytes = b"", *more: tuple[str, str]) -> bytes:
        return self.head(stream_id, name, *more) + last(stream_id, grpc_framing.message(body))

    async def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Return all frames that the server has sent until it closes, each as (kind, flags, stream,
        body)."""
        await asyncio.wait_for(self.lost.wait(), 10)
        decoded, at = [], 0
        while at < len(self.received):
            high, low, kind, flags, stream_id = frames.HEAD.unpack_from(self.received, at)
            begin = at + frames.HEAD_BYTES
            at = begin + (high << 8 | low)
            decoded.append((kind, flags, stream_id, bytes(self.received[begin:at])))
        return decoded

    async def statuses(self, name: str = "grpc-status") -> dict[int, str]:
        """Half-close, wait until the server has closed, and return a dict: stream -> the field
        `name` of the stream's last headers."""
        self.transport.write_eof()
        decoder = hpack.Decoder()
        statuses = [
            (s, {str(n): str(v) for n, v in decoder.decode(body)})
            for kind, _, s, body in await self.frames()
            if kind == frames.HEADERS
        ]
        return {stream_id: fields[name] for stream_id, fields in statuses if name in fields}

    async def goaway_code(self) -> ErrorCode:
        body = [body for kind, _, _, body in await self.frames() if kind == frames.GOAWAY][-1]
        return ErrorCode(struct.unpack(">I", body[4:8])[0])

    async def send(self, data: bytes) -> None:
        """Send bytes and let the server read them; a connection that the server has closed is no
        error."""
        if not self.lost.is_set():
            self.transport.write(data)
            await self._writable.wait()
        await asyncio.sleep(0)


def last(stream_id: int, body: bytes) -> bytes:
    """Return the DATA frame with the request's body, which ends the request."""
    return head(len(body), frames.DATA, END_STREAM, stream_id) + body


@pytest.fixture
async def raw(world: World) -> AsyncIterator[Raw]:
    async with Raw(world) as raw:
        yield raw


async def test_a_client_that_disconnects_ends_its_calls(world: World) -> None:
    async with Raw(world) as raw:
        await raw.send(
            HELLO + raw.call(1, "wait") + raw.call(3, "wait") + raw.call(5, "flood", b"1000")
        )
        await until(lambda: world.calls.started == 3)
    await until(lambda: world.calls.ended == 3 and not world.server._connections)


async def test_a_request_byte_by_byte_is_answered(world: World, raw: Raw) -> None:
    for byte in HELLO + raw.call(1, "echo", b"slow"):
        await raw.send(bytes([byte]))
    await until(lambda: grpc_framing.OK_BLOCK in raw.received)
    raw.transport.write_eof()
    kinds = [(kind, stream_id) for kind, _, stream_id, _ in await raw.frames()]
    assert kinds[-3:] == [(frames.HEADERS, 1), (frames.DATA, 1), (frames.HEADERS, 1)]


async def test_requests_of_other_protocols_are_refused(world: World, raw: Raw) -> None:
    get = raw.encoder.encode([(":method", "GET"), (":scheme", "http"), (":path", "/")])
    form = raw.encoder.encode([*FIELDS[:3], (":path", "/t.T/echo"), ("content-type", "text/plain")])
    await raw.send(HELLO)
    for stream_id, block in ((1, get), (3, form)):
        await raw.send(
            head(len(block), frames.HEADERS, END_HEADERS | END_STREAM, stream_id) + block
        )
    assert await raw.statuses(":status") == {1: "405", 3: "415"}
    assert raw.received.count(b"this is a gRPC server") == 2


async def test_requests_of_other_protocols_are_answered_at_their_end_or_at_a_limit(
    world: World, raw: Raw
) -> None:
    block = raw.encoder.encode([*FIELDS[:3], (":path", "/upload"), ("content-type", "text/plain")])
    await raw.send(HELLO)
    for stream_id in (1, 3, 5):
        await raw.send(head(len(block), frames.HEADERS, END_HEADERS, stream_id) + block)
    await raw.send(head(100, frames.DATA, 0, 1) + bytes(100) + last(1, b""))
    await raw.send(2 * (head(16384, frames.DATA, 0, 3) + bytes(16384)))
    await until(lambda: raw.received.count(b"this is a gRPC server") == 2)
    (connection,) = world.server._connections
    assert list(connection._non_grpc) == [5]
    await raw.send(frames.rst_stream(5, ErrorCode.CANCEL))
    assert await raw.statuses(":status") == {1: "415", 3: "415"}


async def test_requests_without_exactly_one_message_are_refused(world: World, raw: Raw) -> None:
    bodies = {
        1: b"",
        3: b"\0\0\0",
        5: grpc_framing.message(b"a") * 2,
        7: b"\0\0\0\0\5abc",
        9: b"\7\0\0\0\0",
    }
    await raw.send(HELLO)
    for stream_id, body in bodies.items():
        await raw.send(raw.head(stream_id, "echo") + last(stream_id, body))
    assert await raw.statuses() == {1: "12", 3: "13", 5: "12", 7: "13", 9: "13"}


async def test_malformed_and_past_deadlines_end_the_call(world: World, raw: Raw) -> None:
    await raw.send(HELLO + raw.call(1, "wait", b"", ("grpc-timeout", "soon")))
    await raw.send(raw.call(3, "wait", b"", ("grpc-timeout", "0n")))
    await raw.send(raw.head(5, "echo", ("grpc-timeout", "50m")))  # the request never ends
    await until(lambda: not world.server._connections or raw.received.count(b"grpc-status") == 3)
    assert await raw.statuses() == {1: "13", 3: "4", 5: "4"}
    await until(lambda: world.calls.ended == world.calls.started)


async def test_streams_reset_in_the_same_read_start_no_work(world: World, raw: Raw) -> None:
    await raw.send(HELLO)
    for number in range(1, 200, 2):
        await raw.send(raw.call(number, "wait") + frames.rst_stream(number, ErrorCode.CANCEL))
    assert await world.call("echo", b"served") == b"served"
    assert world.calls.started == 0


async def test_a_rapid_reset_attack_ends_the_connection(world: World, raw: Raw) -> None:
    """The client resets each stream after the server has started the stream's work. Other clients
    are served."""
    await raw.send(HELLO)
    for number in range(1, 4001, 2):
        await raw.send(raw.call(number, "wait"))
        await raw.send(frames.rst_stream(number, ErrorCode.CANCEL))
    assert await world.call("echo", b"served") == b"served"
    assert await raw.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM
    await until(lambda: world.calls.ended == world.calls.started)
    assert 0 < world.calls.started < 1500


async def test_work_that_ignores_its_reset_counts_as_an_open_stream(open_world: Any) -> None:
    async with open_world(streams=5) as world:
        free = asyncio.Event()

        async def stubborn(request: bytes) -> bytes:
            world.calls.started += 1
            try:
                await free.wait()
            except asyncio.CancelledError:
                await free.wait()
            return b""

        world.server._shared.methods[b"/t.T/stubborn"] = Method("stubborn", bytes, stubborn, bytes)
        async with Raw(world) as raw:
            await raw.send(HELLO)
            for number in range(1, 41, 2):
                await raw.send(raw.call(number, "stubborn"))
                await asyncio.sleep(0.01)
                await raw.send(frames.rst_stream(number, ErrorCode.CANCEL))
            assert world.calls.started == 5
            free.set()
            await until(lambda: world.server.calls == 0)
            await raw.send(raw.call(101, "echo", b"again"))
            assert await raw.statuses() == {101: "0"}


@pytest.mark.parametrize("name", LARGE)
async def test_replies_wait_while_the_client_does_not_read(
    world: World, raw: Raw, name: str
) -> None:
    """While one reply waits for the client's flow-control window, which is 0, no other reply of the
    connection is computed."""
    count, size = 12, 8 << 20
    await raw.send(frames.PREFACE + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0}))
    for number in range(1, 2 * count, 2):
        await raw.send(raw.call(number, name, b"%d" % size))
    assert await world.call("echo", b"others") == b"others"
    (connection,) = (connection for connection in world.server._connections if connection._calls)
    await until(lambda: connection._http.queued_bytes > 0)
    assert connection._http.queued_bytes < size + BACKLOG_BYTES and world.calls.encoded <= 2
    await raw.send(raw.call(99, "echo", b"x") + raw.call(101, "wait"))
    raw.transport.write(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 30}))
    raw.transport.write(frames.window_update(0, 1 << 30))
    await until(lambda: raw.received.count(grpc_framing.OK_BLOCK) == count + 1)
    assert world.calls.encoded == count and len(raw.received) > count * size
    assert not connection._waiting and list(connection._calls) == [101]


async def test_a_call_that_ends_before_its_reply_blocks_no_other(world: World, raw: Raw) -> None:
    """When a call ends by a reset or its deadline, the calls that wait behind it are answered."""
    await raw.send(frames.PREFACE + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0}))
    size = b"%d" % (8 << 20)
    await raw.send(raw.call(1, "large", size))
    for number, name in enumerate(LARGE):
        await raw.send(raw.call(3 + 4 * number, name, size))
        await raw.send(raw.call(5 + 4 * number, name, size, ("grpc-timeout", "300m")))
    (connection,) = world.server._connections
    await until(lambda: raw.received.count(b"grpc-status") == 3)
    await raw.send(b"".join(frames.rst_stream(n, ErrorCode.CANCEL) for n in (3, 7, 11)))
    await raw.send(raw.call(99, "large_later", b"7"))
    await until(lambda: list(connection._calls) == [99])
    raw.transport.write(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 30}))
    raw.transport.write(frames.window_update(0, 1 << 30))
    await until(lambda: raw.received.count(grpc_framing.OK_BLOCK) == 2)
    await until(lambda: not connection._calls and not world.server.calls)
    assert (
        b"x" * 7 + head(len(grpc_framing.OK_BLOCK), frames.HEADERS, END_HEADERS | END_STREAM, 99)
        in raw.received
    )
    assert world.calls.encoded == 2 and world.calls.started == world.calls.ended


@pytest.mark.parametrize("end", ["abort", "break", "stop"])
async def test_a_connection_that_has_ended_is_freed_at_once(world: World, end: str) -> None:
    """The connection and all that it refers to are freed without a run of the garbage collector."""
    greeting = frames.PREFACE + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0})
    gc.collect()
    gc.disable()
    try:
        async with Raw(world) as raw:
            await raw.send(greeting)
            names = ("wait", "flood", "large_parts", "large_later", "large", "large")
            for number, name in enumerate(names):
                await raw.send(
                    raw.call(2 * number + 1, name, b"10" if name == "flood" else b"9000000")
                )
            connections = world.server._connections
            await until(
                lambda: (
                    world.calls.started == 3
                    and any(connection._waiting for connection in connections)
                )
            )
            references = [
                weakref.ref(thing)
                for connection in connections
                for thing in (connection, connection._http)
            ]
            if end == "break":
                await raw.send(head(3, frames.PING, 0, 0) + b"bad")
                await until(lambda: raw.lost.is_set())
            elif end == "stop":
                next(iter(world.server._connections)).stop()
        await until(lambda: not world.server._connections and not world.server.calls)
        await asyncio.sleep(0)
        assert [ref() for ref in references] == [None, None]
    finally:
        gc.enable()


async def test_a_client_that_does_not_read_is_not_read(world: World, raw: Raw) -> None:
    """A client sends calls and pings without end and reads nothing: its socket's buffers fill, and
    the server stores no more."""
    raw.transport.pause_reading()
    await raw.send(HELLO)
    ping = head(8, frames.PING, 0, 0) + bytes(8)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            for number in range(1, 200_000, 2):
                await raw.send(raw.call(number, "large", b"1000") + ping)
    assert not raw.lost.is_set()
    assert await world.call("echo", b"served") == b"served"
    raw.transport.resume_reading()
    await until(lambda: len(raw.received) > 1000)


async def test_a_client_without_a_preface_is_closed(open_world: Any) -> None:
    async with open_world(greeting_s=1.0) as world, Raw(world) as silent, Raw(world) as half:
        await half.send(HELLO[:-1])
        await silent.frames(), await half.frames()
        assert await world.call("echo", b"served") == b"served"
        await asyncio.sleep(1.2)
        assert await world.call("echo", b"still") == b"still"


async def test_calls_of_a_connection_that_breaks_do_not_start(world: World) -> None:
    for _ in range(3):
        async with Raw(world) as raw:
            calls = raw.call(1, "wait") + raw.call(3, "flood", b"10") + raw.call(5, "later")
            await raw.send(HELLO + calls + head(3, frames.PING, 0, 0) + b"bad")
            assert await raw.goaway_code() == ErrorCode.FRAME_SIZE_ERROR
    await until(lambda: not world.server._connections)
    assert world.calls.started == 0 == world.server.calls


@pytest.mark.filterwarnings("error")
async def test_a_call_cancelled_before_its_first_step_is_uncounted(world: World, raw: Raw) -> None:
    """A task that is cancelled before its first step runs none of its code. Its call is still
    removed from the count."""

    def stop(request: bytes) -> bytes:
        for connection in list(world.server._connections):
            connection.stop()
        return b""

    world.server._shared.methods[b"/t.T/stop"] = Method("stop", bytes, stop, bytes)
    calls = raw.call(1, "wait") + raw.call(3, "flood", b"10")
    await raw.send(HELLO + calls + raw.call(5, "stop"))
    await raw.frames()
    assert world.calls.started == 0 == world.server.calls


async def test_a_handler_may_cancel_itself(world: World) -> None:
    async def cancelled(request: bytes) -> bytes:
        raise asyncio.CancelledError

    world.server._shared.methods[b"/t.T/cancelled"] = Method("cancelled", bytes, cancelled, bytes)
    assert (await code_of(world.call("cancelled", timeout=5)))[0] == grpc.StatusCode.CANCELLED


async def test_too_many_calls_at_once_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "CALLS_LIMIT", 3)
    waiting = [asyncio.ensure_future(world.call("wait", b"%d" % n)) for n in range(3)]
    await until(lambda: world.calls.started == 3)
    assert (await code_of(world.call("wait")))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError):
        await world.stream("count", b"3").read()
    assert await world.call("echo", b"at once") == b"at once"
    world.calls.gate.set()
    assert await asyncio.gather(*waiting) == [b"0", b"1", b"2"]
    assert [bytes(m) async for m in world.stream("count", b"2")] == [b"0", b"1"]


async def test_garbage_ends_only_its_connection(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        async with Raw(world) as raw:
            await raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await raw.goaway_code() == ErrorCode.PROTOCOL_ERROR
    assert await world.call("echo", b"served") == b"served"
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


async def test_the_longest_idle_connection_makes_room(
    open_world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_LIMIT", 10)
    async with open_world() as world:
        assert await world.call("echo", b"first") == b"first"
        waiting = asyncio.ensure_future(world.call("wait", b"w"))
        await until(lambda: world.calls.started == 1)
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(Raw(world)) for _ in range(100)]
            await until(lambda: sum(not s.lost.is_set() for s in silent) == 9)
            assert await world.call("echo", b"served") == b"served"
            world.calls.gate.set()
            assert await waiting == b"w"
        assert "10 connections are the limit" in caplog.text


async def test_connections_with_endless_requests_are_closed_for_new_connections(
    open_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_LIMIT", 10)
    async with open_world() as world, contextlib.AsyncExitStack() as stack:
        stuck = []
        for _ in range(10):
            raw = await stack.enter_async_context(Raw(world))
            await raw.send(HELLO + raw.head(1, "echo") + head(5, frames.DATA, 0, 1) + b"\0\0\0\0\7")
            stuck.append(raw)
        await until(
            lambda: sum(len(connection._calls) for connection in world.server._connections) == 10
        )
        assert await world.call("echo", b"served", timeout=30) == b"served"
        await until(lambda: sum(raw.lost.is_set() for raw in stuck) == 1)
        assert stuck[0].lost.is_set()


async def test_incomplete_requests_of_all_clients_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests beyond the limit for all connections together are refused, although each fits into
    its stream's initial window."""
    monkeypatch.setattr(shared, "LARGE_LIMIT_BYTES", 1 << 20)
    part = grpc_framing.prefix(60_000) + bytes(16_000)
    async with Raw(world) as raw:
        await raw.send(HELLO)
        for number in range(1, 201, 2):
            await raw.send(
                raw.head(number, "echo") + head(len(part), frames.DATA, 0, number) + part
            )
        await until(
            lambda: (
                raw.received.count(b"too many large requests at once")
                == 100 - (1 << 20) // len(part)
            )
        )
        assert world.server._shared._large_bytes <= 1 << 20
        assert await world.call("echo", b"small") == b"small"
    await until(lambda: world.server._shared._large_bytes == 0)


async def test_a_gzip_bomb_is_refused(world: World, raw: Raw) -> None:
    packed = gzip.compress(b"\0" * (100 << 20))
    body = b"\1" + len(packed).to_bytes(4, "big") + packed
    await raw.send(HELLO + raw.head(1, "echo", ("grpc-encoding", "gzip")))
    parts = [body[begin : begin + 16384] for begin in range(0, len(body), 16384)]
    for part in parts[:-1]:
        await raw.send(head(len(part), frames.DATA, 0, 1) + part)
    await raw.send(last(1, parts[-1]))
    assert await raw.statuses() == {1: "8"}


async def test_large_requests_of_all_clients_together_are_bounded(world: World, raw: Raw) -> None:
    await raw.send(HELLO)
    prefix = b"\0" + (30 << 20).to_bytes(4, "big")
    for number in range(1, 41, 2):
        await raw.send(
            raw.head(number, "echo") + head(len(prefix), frames.DATA, 0, number) + prefix
        )
    await until(lambda: raw.received.count(b"grpc-status") == 12)
    assert world.server._shared._large_bytes == 8 * (30 << 20)
    statuses = await raw.statuses()
    assert set(statuses.values()) == {"8"} and len(statuses) == 12
    await until(lambda: world.server._shared._large_bytes == 0)
