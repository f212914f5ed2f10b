"""Blocks of shared memory between a sender and a receiver that may be hostile."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterator

import pytest

from cri_server.images.ring import BLOCK_BYTES, BLOCKS, Interrupted, Receiver, Ring

ALL = BLOCKS * BLOCK_BYTES


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()
    made.receiver.close()


def received(end: Receiver) -> bytes:
    found = bytearray()
    while part := end.read():
        found += part
    return bytes(found)


@pytest.mark.parametrize("largest", [1, 700, BLOCK_BYTES, 3 * ALL], ids=["bytes", "small", "blocks", "large"])
def test_what_is_sent_arrives_in_order(ring: Ring, largest: int) -> None:
    chance = random.Random(largest)
    pieces = [chance.randbytes(chance.randint(1, largest)) for _ in range(min(2000, 1 + 8 * ALL // largest))]

    def send() -> None:
        for piece in pieces:
            ring.write(piece)
        ring.close()

    thread = threading.Thread(target=send)
    thread.start()
    found = received(ring.receiver)
    thread.join()
    assert found == b"".join(pieces)
    assert ring.receiver.read() == b"", "the end stays the end"


def test_what_was_read_stays_until_the_next_is(ring: Ring) -> None:
    ring.write(b"first")
    part = ring.receiver.read()
    thread = threading.Thread(target=ring.write, args=(bytes(ALL),))
    thread.start()  # waits for the last block
    thread.join(0.1)
    assert thread.is_alive() and part == b"first"
    ring.receiver.read()
    thread.join(10)
    assert not thread.is_alive()


def test_a_slow_sender_uses_little_memory(ring: Ring) -> None:
    memory = ring.receiver.fds[0]
    for _ in range(10 * BLOCKS):
        ring.write(b"x")
        assert ring.receiver.read() == b"x"
    assert os.fstat(memory).st_blocks * 512 <= BLOCKS * mmap.PAGESIZE


def test_the_receiver_cannot_change_the_memory(ring: Ring) -> None:
    """It may have been taken over: neither what was hashed nor the sender's mapping is its to spoil."""
    memory = ring.receiver.fds[0]
    with pytest.raises(PermissionError):
        mmap.mmap(memory, ALL)
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    for size in (0, 2 * ALL):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    ring.write(b"still")
    assert ring.receiver.read() == b"still"


@pytest.mark.parametrize("freed", [bytes([BLOCKS]), b"\xff", b"\1\1"], ids=["next", "far", "twice"])
def test_a_receiver_that_lies_is_interrupted(ring: Ring, freed: bytes) -> None:
    ring.write(bytes(ALL))
    os.write(ring.receiver.fds[2], freed)
    with pytest.raises(Interrupted):
        ring.write(b"x")


@pytest.mark.parametrize("size", [1, 2 * ALL], ids=["at once", "waiting"])
def test_nobody_receives_any_more(ring: Ring, size: int) -> None:
    timer = threading.Timer(0.05 if size > 1 else 0, ring.receiver.close)
    timer.start()
    if size == 1:
        timer.join()
    with pytest.raises(Interrupted):
        ring.write(bytes(size))


def test_a_closed_ring_takes_nothing(ring: Ring) -> None:
    ring.write(b"x")
    ring.close()
    ring.close()
    with pytest.raises(Interrupted):
        ring.write(b"y")
    assert received(ring.receiver) == b"x"
