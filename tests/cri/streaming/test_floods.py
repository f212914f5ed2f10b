"""Tests clients that flood the server with frames: other sessions continue, the server stores a
bounded part of the flood, and ended connections are freed.

All sessions and kubelet's calls share one event loop. The tests count the frames that are handled
in one turn of the loop, not its duration.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cri_server.streaming import connection as connection_module
from cri_server.streaming.backend import ExecSessionOptions, PortForwardOptions
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.spdy import frames
from cri_server.streaming.spdy.connection import SpdyConnection
from cri_server.streaming.streams import BUDGET_BYTES
from cri_server.streaming.transport import SocketTransport
from cri_server.streaming.websocket import Messages
from tests.cri.streaming.client import V4, connect
from tests.cri.streaming.conftest import GoExec
from tests.cri.streaming.processes import ProcessBackend
from tests.cri.streaming.test_hostile import SPDY, WEBSOCKET, connection, path_of, request
from tests.support.spdy import SpdyClient

FLOOD_BYTES = 1 << 20
FRAMES_OF_A_TURN = 1000
STUCK = ExecSessionOptions(  # sleep reads no stdin
    "c", ("/bin/sh", "-c", "exec sleep 1000"), stdin=True, stdout=True, stderr=True
)


def spdy(*roles: str) -> tuple[SpdyConnection, bytes]:
    """Return a client's SPDY connection with a stream for each role, and the bytes that open the
    streams."""
    client = SpdyClient()
    for role in roles:
        client.open({"streamtype": [role]})
    return client, client.data_to_send()


def pings() -> bytes:
    return frames.ping(1) * (FLOOD_BYTES // 12)


def refused_streams() -> bytes:
    client = SpdyClient()
    parts: list[bytes] = []
    while len(parts) * 26 < FLOOD_BYTES:
        client.open({"streamtype": ["no such thing"]})
        parts.append(client.data_to_send())
    return b"".join(parts)


def empty_data() -> bytes:
    _, begin = spdy("error", "stdin", "stdout", "stderr")
    return begin + frames.data_head(3, 0, False) * (FLOOD_BYTES // 8)


def tiny_data() -> bytes:
    """Return SPDY data frames of one octet each for stdin."""
    _, begin = spdy("error", "stdin", "stdout", "stderr")
    return begin + (frames.data_head(3, 1, False) + b"x") * (FLOOD_BYTES // 9)


def masked(opcode: int, payload: bytes = b"") -> bytes:
    return bytes((opcode, 0x80 | len(payload))) + bytes(4) + payload


def websocket_pings() -> bytes:
    return masked(0x89) * (FLOOD_BYTES // 6)


def websocket_fragments() -> bytes:
    return masked(0x02) + masked(0x00) * (FLOOD_BYTES // 6)


def websocket_messages() -> bytes:
    """Return WebSocket messages for a channel that does not exist."""
    return masked(0x82, b"\x07x") * (FLOOD_BYTES // 8)


def websocket_input() -> bytes:
    return masked(0x82, b"\x00x") * (FLOOD_BYTES // 8)


FLOODS = [
    pings,
    refused_streams,
    empty_data,
    tiny_data,
    websocket_pings,
    websocket_fragments,
    websocket_messages,
    websocket_input,
]


class Turns:
    """Counts the turns of the event loop, and the frames handled in each."""

    def __init__(self) -> None:
        self.number = 0
        self.handled: Counter[int] = Counter()

    async def count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            self.handled[self.number] += 1
            return function(*arguments)

        return wrapper


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    """Count the SPDY and WebSocket frames that each turn of the event loop handles."""
    turns = Turns()
    monkeypatch.setattr(SpdyConnection, "_frame", turns.counting(SpdyConnection._frame))
    monkeypatch.setattr(Messages, "_take", turns.counting(Messages._take))
    counting = asyncio.create_task(turns.count())
    yield turns
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)


def opening(server: StreamingServer, flood: Callable[[], bytes]) -> bytes:
    path = path_of(server.url_for(STUCK))
    if flood.__name__.startswith("websocket"):
        return request(path, *WEBSOCKET, method="GET")
    return request(path, *SPDY)


async def send_flood(
    server: StreamingServer, flood: Callable[[], bytes], sent: asyncio.Event
) -> None:
    """Open a session, send the flood while reading the answers, and keep the connection open."""
    data = opening(server, flood) + flood()
    async with connection(server) as (reader, writer):

        async def read() -> None:
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass

        reading = asyncio.create_task(read())
        try:
            with contextlib.suppress(ConnectionError):
                for at in range(0, len(data), 1 << 16):
                    writer.write(data[at : at + (1 << 16)])
                    await writer.drain()
            sent.set()
            await reading
        finally:
            reading.cancel()


@pytest.mark.parametrize("flood", FLOODS)
async def test_other_sessions_get_their_turns(
    server: StreamingServer, go: GoExec, turns: Turns, flood: Callable[[], bytes]
) -> None:
    sent = asyncio.Event()
    flooding = asyncio.create_task(send_flood(server, flood, sent))
    try:
        async with asyncio.timeout(60):
            while sum(turns.handled.values()) < 5000 and not sent.is_set():
                await asyncio.sleep(0)
        assert (await go("echo well")).stdout == b"well\n"
        assert max(turns.handled.values()) <= FRAMES_OF_A_TURN
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


@pytest.mark.parametrize("flood", [tiny_data, websocket_input])
async def test_buffered_pieces_are_counted_with_their_overhead(
    server: StreamingServer, flood: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cri_server.streaming import streams

    budgets: list[streams.Budget] = []
    make = streams.Budget.__init__

    def remember(budget: streams.Budget, *arguments: Any) -> None:
        make(budget, *arguments)
        budgets.append(budget)

    monkeypatch.setattr(streams.Budget, "__init__", remember)
    chunks: Counter[int] = Counter()
    feed = streams.Inbound.feed

    def count(inbound: streams.Inbound, data: bytes) -> None:
        feed(inbound, data)
        chunks[id(inbound)] = len(inbound._chunks)

    monkeypatch.setattr(streams.Inbound, "feed", count)
    flooding = asyncio.create_task(send_flood(server, flood, asyncio.Event()))
    try:
        async with asyncio.timeout(60):
            while not any(budget.exhausted for budget in budgets):
                await asyncio.sleep(0.01)
        assert 0 < max(chunks.values()) < BUDGET_BYTES // 32
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


# ---- orders


@pytest.mark.parametrize("ended", ["as they open", "when all are open", "stdin last"])
async def test_streams_open_and_end_in_any_order(server: StreamingServer, ended: str) -> None:
    """The session begins when its last stream is open, and the client gets the exit code, no matter
    when it half-closes the streams."""
    options = ExecSessionOptions(
        "c", ("/bin/sh", "-c", "cat; exit 5"), stdin=True, stdout=True, stderr=True
    )
    for roles in itertools.permutations(("error", "stdin", "stdout", "stderr")):
        async with connect(server.url_for(options), V4) as multiplexer, asyncio.timeout(60):
            streams = {}
            for role in roles:
                streams[role] = await multiplexer.open({"streamtype": [role]})
                if ended == "as they open":
                    await streams[role].end()
            for role in sorted(
                streams, key=lambda role: (ended == "stdin last") == (role == "stdin")
            ):
                if ended != "as they open":
                    await streams[role].end()
            outcome = await streams["error"].inbound.read()
        assert json.loads(outcome)["details"]["causes"][0]["message"] == "5", roles


# ---- what ends is freed


ENDS = {
    "no such ticket": lambda s: request("/exec/none", *SPDY),
    "no stream protocol": lambda s: request(path_of(s.url_for(STUCK)), *SPDY[:2]),
    "broken SPDY": lambda s: request(path_of(s.url_for(STUCK)), *SPDY) + b"\xff" * 100,
    "broken session": lambda s: (
        opening(s, pings) + spdy("error", "stdin", "stdout", "stderr")[1] + b"\xff" * 100
    ),
    "broken WebSocket": lambda s: opening(s, websocket_pings) + b"\xff" * 100,
    "port-forward": lambda s: (
        request(
            path_of(s.url_for(PortForwardOptions("pod"))),
            *SPDY[:2],
            "X-Stream-Protocol-Version: portforward.k8s.io",
        )
        + spdy("error", "data")[1]
        + b"\xff" * 100
    ),
    "input and gone": lambda s: opening(s, tiny_data) + tiny_data()[:5000],
    "WebSocket input and gone": lambda s: opening(s, websocket_input) + websocket_input()[:4800],
    "a second request": lambda s: (
        request(path_of(s.url_for(STUCK)), *SPDY) + request("/exec/none", *SPDY)
    ),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_connection_that_has_ended_is_freed_at_once(
    backend: ProcessBackend, server: StreamingServer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The connection's buffers are freed at once, not at the next run of the garbage collector."""
    wires: list[weakref.ref[SocketTransport]] = []

    class Remembered(SocketTransport):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            wires.append(weakref.ref(self))

    monkeypatch.setattr(connection_module, "SocketTransport", Remembered)
    gc.collect()
    gc.disable()
    try:
        async with connection(server) as (reader, writer):
            writer.write(ENDS[end](server))
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.3):
                    await reader.read()
        async with asyncio.timeout(30):
            while server._connections or any(
                not session.closed.is_set() for session in backend.sessions
            ):
                await asyncio.sleep(0.01)
        assert [transport() for transport in wires] == [None]
    finally:
        gc.enable()
