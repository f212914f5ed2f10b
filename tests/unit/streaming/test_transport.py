"""Tests that a transport keeps order and whole frames under back-pressure and cancellation, and
notices peers that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from cri_server.streaming.descriptors import read_some, write_all
from cri_server.streaming.transport import POSTED_LIMIT_BYTES, ConnectionLost, SocketTransport


@contextlib.asynccontextmanager
async def pair(**options: float) -> AsyncIterator[tuple[SocketTransport, socket.socket]]:
    """Yield a transport over TCP on loopback, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    theirs.setblocking(False)
    transport = SocketTransport(ours, **options)
    try:
        async with asyncio.timeout(20):
            yield transport, theirs
    finally:
        transport.abort()
        theirs.close()


async def read_all(sock: socket.socket) -> bytes:
    whole = bytearray()
    while data := await read_some(sock.fileno()):
        whole += data
    return bytes(whole)


async def test_pieces_of_many_senders_stay_whole() -> None:
    async with pair() as (transport, theirs):
        pieces = [bytes((n,)) * 4096 for n in range(200)]
        sending = [asyncio.create_task(transport.send(b"<", piece, b">")) for piece in pieces]
        reading = asyncio.create_task(read_all(theirs))
        await asyncio.gather(*sending)
        await transport.close(1)
        assert await reading == b"".join(b"<" + piece + b">" for piece in pieces)


async def test_posted_bytes_are_sent_between_pieces() -> None:
    async with pair() as (transport, theirs):
        big = asyncio.create_task(transport.send(b"a" * 10_000_000))
        await asyncio.sleep(0.05)
        assert not big.done()
        transport.post(b"1")
        transport.post(b"2")
        after = asyncio.create_task(transport.send(b"b"))
        reading = asyncio.create_task(read_all(theirs))
        await asyncio.gather(big, after)
        transport.post(b"3")
        await transport.close(1)
        assert await reading == b"a" * 10_000_000 + b"12b3"


async def test_posting_never_waits_and_is_bounded() -> None:
    async with pair() as (transport, theirs):
        sent = 0
        with pytest.raises(ConnectionLost):
            for _ in range(10_000):
                transport.post(b"p" * 1000)
                sent += 1
        assert sent * 1000 > POSTED_LIMIT_BYTES
        got = len(await asyncio.wait_for(read_some(theirs.fileno(), 1 << 20), 60))
        assert got > 0


async def test_posted_bytes_are_sent_when_the_peer_reads_again() -> None:
    async with pair() as (transport, theirs):
        with contextlib.suppress(ConnectionLost):
            for n in range(100_000):
                transport.post(b"%06d" % n)
                await asyncio.sleep(0)
        total = n * 6
        data = b""
        while len(data) < total:
            data += await read_some(theirs.fileno(), 1 << 20)
        assert data[:total] == b"".join(b"%06d" % m for m in range(n))


async def test_a_cancelled_sender_does_not_cut_a_frame() -> None:
    async with pair() as (transport, theirs):
        cut = asyncio.create_task(transport.send(b"x" * 10_000_000))
        await asyncio.sleep(0.05)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        after = asyncio.create_task(transport.send(b"next"))
        reading = asyncio.create_task(read_all(theirs))
        await after
        await transport.close(1)
        assert await reading == b"x" * 10_000_000 + b"next"


async def test_a_silent_connection_is_lost() -> None:
    async with pair(idle_s=1.5) as (transport, theirs):
        for _ in range(5):
            await asyncio.sleep(0.4)
            await write_all(theirs.fileno(), b"x")
            assert bytes(await transport.receive()) == b"x"
        with pytest.raises(ConnectionLost, match="no traffic"):
            await transport.receive()


async def test_output_resets_the_idle_timeout() -> None:
    async with pair(idle_s=1.5) as (transport, _theirs):
        receiving = asyncio.create_task(transport.receive())
        for _ in range(5):
            await asyncio.sleep(0.4)
            await transport.send(b"x")
        assert not receiving.done()
        with pytest.raises(ConnectionLost):
            await receiving


async def test_a_hang_up_is_noticed_without_reading() -> None:
    async with pair() as (transport, theirs):
        await write_all(theirs.fileno(), b"unread")
        watching = asyncio.create_task(transport.hung_up())
        await asyncio.sleep(0.05)
        assert not watching.done()
        theirs.shutdown(socket.SHUT_WR)
        await watching
        assert bytes(await transport.receive()) == b"unread"


async def test_a_reset_by_the_peer_loses_the_connection() -> None:
    async with pair() as (transport, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        theirs.close()
        with pytest.raises(ConnectionLost):
            await transport.receive()
        with pytest.raises(ConnectionLost):
            while True:
                await transport.send(b"x" * 1000)


async def test_unread_bytes_are_returned_before_the_end() -> None:
    async with pair() as (transport, theirs):
        transport.unread(b"first")
        await write_all(theirs.fileno(), b"second")
        assert [bytes(await transport.receive()), bytes(await transport.receive())] == [
            b"first",
            b"second",
        ]


async def test_closing_waits_for_the_peer_but_not_for_ever() -> None:
    async with pair() as (transport, theirs):
        await transport.send(b"bye")
        started = asyncio.get_running_loop().time()
        await transport.close(0.3)
        assert 0.25 < asyncio.get_running_loop().time() - started < 2
        assert await read_all(theirs) == b"bye"
