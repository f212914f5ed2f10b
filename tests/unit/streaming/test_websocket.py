"""Tests WebSocket channels over a real socket, with the client side of the `websockets` package at
the other end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from cri_server.streaming.streams import StreamGone
from cri_server.streaming.transport import SocketTransport
from cri_server.streaming.websocket import DIALECTS, MESSAGE_LIMIT_BYTES, Channels, Messages


class Peer:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket, self.core = sock, Protocol(Side.CLIENT, max_size=None)
        self.frames: list[Frame] = []

    async def flush(self) -> None:
        for data in self.core.data_to_send():
            await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def message(self, data: bytes, fin: bool = True) -> None:
        self.core.send_binary(data, fin)
        await self.flush()

    async def receive(self) -> Frame | None:
        while not self.frames:
            data = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
            if not data:
                return None
            self.core.receive_data(data)
            self.frames += [
                event for event in self.core.events_received() if isinstance(event, Frame)
            ]
        return self.frames.pop(0)

    async def close_code(self) -> int:
        while (frame := await self.receive()) is not None:
            if frame.opcode is Opcode.CLOSE:
                return int.from_bytes(frame.data[:2], "big")
        raise AssertionError("no close frame")


@contextlib.asynccontextmanager
async def connected(
    subprotocol: str = "v4.channel.k8s.io",
) -> AsyncIterator[tuple[Peer, Channels, asyncio.Task[str]]]:
    """Yield a client, our channels 0 to 4, and the task that reads them."""
    ours, theirs = socket.socketpair()
    transport = SocketTransport(ours)
    channels = Channels(Messages(transport), DIALECTS[subprotocol])
    for number in range(5):
        channels.channel(number)
    reading = asyncio.create_task(channels.run())
    try:
        async with asyncio.timeout(10):
            yield Peer(theirs), channels, reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        transport.abort()
        theirs.close()


@pytest.mark.requirement("9.9")
async def test_channels_carry_data_in_both_directions() -> None:
    async with connected() as (peer, channels, _):
        await peer.message(b"\x00input")
        assert await channels.channel(0).inbound.read() == b"input"
        await channels.channel(1).write(b"output")
        await channels.channel(2).write(b"")
        frames = [await peer.receive(), await peer.receive()]
        assert [(f.opcode, bytes(f.data)) for f in frames if f] == [
            (Opcode.BINARY, b"\x01output"),
            (Opcode.BINARY, b"\x02"),
        ]


async def test_base64_channels_are_decoded() -> None:
    async with connected("v4.base64.channel.k8s.io") as (peer, channels, _):
        peer.core.send_text(b"0aW5wdXQ=")
        await peer.flush()
        assert await channels.channel(0).inbound.read() == b"input"
        await channels.channel(1).write(b"output")
        frame = await peer.receive()
        assert frame is not None and (frame.opcode, bytes(frame.data)) == (
            Opcode.TEXT,
            b"1b3V0cHV0",
        )


async def test_invalid_base64_closes_the_connection() -> None:
    async with connected("base64.channel.k8s.io") as (peer, _channels, reading):
        peer.core.send_text(b"0****")
        await peer.flush()
        assert await peer.close_code() == CloseCode.PROTOCOL_ERROR
        assert "base64" in await reading


@pytest.mark.requirement("9.10")
async def test_v5_closes_a_channel() -> None:
    async with connected("v5.channel.k8s.io") as (peer, channels, _):
        for message in (b"\x00last", b"\xff\x00", b"\xff", b"\xff\x09", b"\x00after"):
            await peer.message(message)
        await peer.message(b"\x04resize")
        assert await channels.channel(4).inbound.read() == b"resize"
        stdin = channels.channel(0).inbound
        assert [await stdin.read(), await stdin.read(), await stdin.read()] == [b"last", b"", b""]


async def test_v4_cannot_close_a_channel() -> None:
    async with connected() as (peer, channels, _):
        await peer.message(b"\xff\x00")
        await peer.message(b"\x00more")
        assert await channels.channel(0).inbound.read() == b"more"


async def test_fragments_are_joined_to_a_message() -> None:
    async with connected() as (peer, channels, _):
        await peer.message(b"\x00in", fin=False)
        peer.core.send_ping(b"between")
        for part, fin in ((b"", False), (b"pu", False), (b"t", True)):
            peer.core.send_continuation(part, fin)
        await peer.flush()
        assert await channels.channel(0).inbound.read() == b"input"
        frame = await peer.receive()
        assert frame is not None and (frame.opcode, frame.data) == (Opcode.PONG, b"between")


async def test_unknown_channels_and_empty_messages_are_skipped() -> None:
    async with connected() as (peer, channels, _):
        for message in (b"", b"\x09what", b"\x00", b"\x00x"):
            await peer.message(message)
        assert await channels.channel(0).inbound.read() == b"x"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(b"\x82\x03abc", CloseCode.PROTOCOL_ERROR, id="unmasked"),
        pytest.param(b"\x09\x80\0\0\0\0", CloseCode.PROTOCOL_ERROR, id="fragmented ping"),
        pytest.param(b"\x80\x81\0\0\0\0x", CloseCode.PROTOCOL_ERROR, id="continues nothing"),
        pytest.param(b"\xf2\x81\0\0\0\0x", CloseCode.PROTOCOL_ERROR, id="reserved bits"),
        pytest.param(b"\x83\x81\0\0\0\0x", CloseCode.PROTOCOL_ERROR, id="unknown opcode"),
        pytest.param(
            b"\x89\xfe\x00\x80\0\0\0\0" + bytes(128), CloseCode.PROTOCOL_ERROR, id="long ping"
        ),
        pytest.param(
            b"\x82\xff" + (MESSAGE_LIMIT_BYTES + 1).to_bytes(8, "big") + bytes(4),
            CloseCode.MESSAGE_TOO_BIG,
            id="too large",
        ),
        pytest.param(b"\x82\xff" + b"\xff" * 8 + bytes(4), CloseCode.PROTOCOL_ERROR, id="exabytes"),
    ],
)
async def test_invalid_frames_close_the_connection_with_the_right_code(
    sent: bytes, code: int
) -> None:
    async with connected() as (peer, channels, reading):
        await asyncio.get_running_loop().sock_sendall(peer.socket, sent)
        received = await peer.close_code()
        assert received == code or (sent[2:3] == b"\xff" and received == CloseCode.MESSAGE_TOO_BIG)
        await reading
        with pytest.raises(StreamGone):
            await channels.channel(0).inbound.read()
        with pytest.raises(StreamGone):
            await channels.channel(1).write(b"late")


async def test_a_close_frame_is_answered() -> None:
    async with connected() as (peer, _channels, reading):
        peer.core.send_close(CloseCode.NORMAL_CLOSURE)
        await peer.flush()
        assert await peer.close_code() == CloseCode.NORMAL_CLOSURE
        await reading


async def test_unread_input_stops_reading_from_the_socket() -> None:
    async with connected() as (peer, channels, _):
        sender = asyncio.create_task(send_much(peer))
        await asyncio.sleep(0.3)
        assert not sender.done()
        assert channels.budget.used_bytes < 2 * channels.budget.limit_bytes
        total = 0
        while total < 20_000_000:
            total += len(await channels.channel(0).inbound.read())
        await sender


async def send_much(peer: Peer) -> None:
    for _ in range(200):
        await peer.message(b"\x00" + bytes(100_000))


async def test_a_flood_of_pings_by_a_client_that_never_reads_ends_the_connection() -> None:
    async with connected() as (peer, _channels, reading):
        peer.socket.setblocking(True)
        peer.socket.settimeout(60)

        def flood() -> None:
            with contextlib.suppress(OSError):
                for _ in range(400):
                    for _ in range(1000):
                        peer.core.send_ping(b"x" * 100)
                    peer.socket.sendall(b"".join(peer.core.data_to_send()))

        flooding = asyncio.create_task(asyncio.to_thread(flood))
        assert "does not read" in await reading
        peer.socket.shutdown(socket.SHUT_RDWR)
        await flooding


@given(
    sent=st.lists(
        st.binary(max_size=60)
        | st.builds(
            lambda op, body: bytes((0x80 | op, 0x80 | len(body))) + bytes(4) + body,
            st.integers(0, 15),
            st.binary(max_size=100),
        ),
        max_size=15,
    )
)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_bytes_end_the_connection_or_are_ignored(
    sent: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def feed() -> None:
        async with connected("v5.channel.k8s.io") as (peer, _channels, reading):
            for data in sent:
                with contextlib.suppress(OSError):
                    await asyncio.get_running_loop().sock_sendall(peer.socket, data)
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
            assert isinstance(await reading, str)

    asyncio.run(feed())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_core_is_open_from_the_start() -> None:
    assert Protocol(Side.SERVER).state is State.OPEN
