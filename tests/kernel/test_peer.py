"""Our end of a socket where the other side answers with descriptors."""

from __future__ import annotations

import asyncio
import os
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair

from pyrunc import ipc
from pyrunc.peer import Peer, answered


def test_an_answer_that_comes_with_a_cancellation_is_closed() -> None:
    """Both happen in one turn of the loop: the asker is cancelled when its answer is there and it did not run yet."""
    asyncio.run(_cancel_with_the_answer())


async def _cancel_with_the_answer() -> None:
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    ours.setblocking(False)
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    peer = Peer(ours, "the other side", lambda message: None)
    with theirs:
        number, answer = peer.ask({"call": "x"})
        asking = asyncio.create_task(_asking(answer))
        answer.add_done_callback(lambda _: asking.cancel())  # before it is woken
        ipc.send(theirs, {"id": number, "ok": {}}, [write_end])
        os.close(write_end)
        await asyncio.wait([asking])
    peer.close("the end")
    assert asking.cancelled()
    assert os.read(read_end, 1) == b"", "nobody has the write end: this is its end of file"
    os.close(read_end)


async def _asking(answer: asyncio.Future[tuple[dict[str, object], list[int]]]) -> None:
    await answered(answer)
