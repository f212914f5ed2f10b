"""Tests `Peer`, one end of a socket whose other end answers requests with messages and
descriptors."""

from __future__ import annotations

import asyncio
import os
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair

import pytest

from cri_server.zygote.peer import Peer, wait_answer
from pyrunc import ipc
from pyrunc.errors import Error


def test_an_answer_that_comes_with_a_cancellation_is_closed() -> None:
    """An answer's descriptors are closed when its request is cancelled in the iteration of the
    event loop in which the answer arrives."""
    asyncio.run(_cancel_with_the_answer())


async def _cancel_with_the_answer() -> None:
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    ours.setblocking(False)
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    peer = Peer(ours, "the other side", lambda message: None)
    with theirs:
        number, answer = peer.ask({"call": "x"})
        asking = asyncio.create_task(_asking(answer))
        answer.add_done_callback(lambda _: asking.cancel())  # before the caller runs
        ipc.send(theirs, {"id": number, "ok": {}}, [write_end])
        os.close(write_end)
        await asyncio.wait([asking])
    peer.close("the end")
    assert asking.cancelled()
    assert os.read(read_end, 1) == b"", "the write end is closed everywhere: end of file"
    os.close(read_end)


async def _asking(answer: asyncio.Future[tuple[dict[str, object], list[int]]]) -> None:
    await wait_answer(answer)


def test_invalid_replies_end_the_request_and_leave_no_descriptors() -> None:
    """After an invalid reply the request raises or uses the next reply; the descriptors are
    closed."""
    asyncio.run(_answer_with_nonsense())


async def _answer_with_nonsense() -> None:
    for nonsense in ({"ok": 7}, {"error": "text"}, {}, {"ok": {}, "error": {}}):
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        ours.setblocking(False)
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        peer = Peer(ours, "the other side", lambda message: None)
        with theirs:
            number, answer = peer.ask({"call": "x"})
            ipc.send(theirs, {"id": [number], **nonsense}, [write_end])
            ipc.send(theirs, {"id": number, **nonsense}, [write_end])
            os.close(write_end)
            with pytest.raises(Error):
                await asyncio.wait_for(wait_answer(answer), 10)
        peer.close("the end")
        assert os.read(read_end, 1) == b"", nonsense
        os.close(read_end)
