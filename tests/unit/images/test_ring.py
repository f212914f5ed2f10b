"""Tests blocks of shared memory between a sender and a receiver, each of which may be hostile."""

from __future__ import annotations

import mmap
import os
import random
import struct
import threading
from collections.abc import Iterator

import pytest

from cri_server.images.layers.ring import (
    BLOCK_BYTES,
    BLOCKS,
    Interrupted,
    Receiver,
    RingSender,
    open_ends,
    open_ring,
)

ALL = BLOCKS * BLOCK_BYTES


Ring = tuple[RingSender, Receiver]


@pytest.fixture
def ring() -> Iterator[Ring]:
    sender, receiver = open_ring()
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.fixture
def ring_of_a_stranger() -> Iterator[Ring]:
    """Return a sender, and a receiver that copies blocks because the sender may be hostile."""
    sending, receiving = open_ends()
    sender, receiver = RingSender(*sending), Receiver(*receiving, copying=True)
    yield sender, receiver
    sender.close()
    receiver.close()


def received(end: Receiver) -> bytes:
    content = bytearray()
    while part := end.read():
        content += part
    return bytes(content)


@pytest.mark.parametrize(
    "largest", [1, 700, BLOCK_BYTES, 3 * ALL], ids=["bytes", "small", "blocks", "large"]
)
def test_blocks_arrive_in_order(ring: Ring, largest: int) -> None:
    sender, receiver = ring
    chance = random.Random(largest)
    pieces = [
        chance.randbytes(chance.randint(1, largest))
        for _ in range(min(2000, 1 + 8 * ALL // largest))
    ]

    def send() -> None:
        for piece in pieces:
            sender.write(piece)
        sender.close()

    thread = threading.Thread(target=send)
    thread.start()
    content = received(receiver)
    thread.join()
    assert content == b"".join(pieces)
    assert receiver.read() == b"", "the end stays the end"


def test_a_block_stays_unchanged_until_the_next_read(ring: Ring) -> None:
    sender, receiver = ring
    sender.write(b"first")
    part = receiver.read()
    thread = threading.Thread(target=sender.write, args=(bytes(ALL),))
    thread.start()  # waits for the last block
    thread.join(0.1)
    assert thread.is_alive() and part == b"first"
    receiver.read()
    thread.join(10)
    assert not thread.is_alive()


def test_a_slow_sender_uses_little_memory(ring: Ring) -> None:
    sender, receiver = ring
    memory = receiver.fds[0]
    for _ in range(10 * BLOCKS):
        sender.write(b"x")
        assert receiver.read() == b"x"
    assert os.fstat(memory).st_blocks * 512 <= BLOCKS * mmap.PAGESIZE


def test_the_receiver_cannot_change_the_memory(ring: Ring) -> None:
    """The receiver may be under an attacker's control: it must change neither the hashed data nor
    the sender's mapping."""
    sender, receiver = ring
    memory = receiver.fds[0]
    with pytest.raises(PermissionError):
        mmap.mmap(memory, ALL)
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    for size in (0, 2 * ALL):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    sender.write(b"still")
    assert receiver.read() == b"still"


@pytest.mark.parametrize("freed", [bytes([BLOCKS]), b"\xff", b"\1\1"], ids=["next", "far", "twice"])
def test_false_numbers_of_the_receiver_interrupt_the_sender(ring: Ring, freed: bytes) -> None:
    sender, receiver = ring
    sender.write(bytes(ALL))
    os.write(receiver.fds[2], freed)
    with pytest.raises(Interrupted):
        sender.write(b"x")


@pytest.mark.parametrize("size", [1, 2 * ALL], ids=["at once", "waiting"])
def test_a_closed_receiver_interrupts_the_sender(ring: Ring, size: int) -> None:
    sender, receiver = ring
    timer = threading.Timer(0.05 if size > 1 else 0, receiver.close)
    timer.start()
    if size == 1:
        timer.join()
    with pytest.raises(Interrupted):
        sender.write(bytes(size))


def test_a_closed_ring_accepts_no_bytes(ring: Ring) -> None:
    sender, receiver = ring
    sender.write(b"x")
    sender.close()
    sender.close()
    with pytest.raises(Interrupted):
        sender.write(b"y")
    assert received(receiver) == b"x"


def test_a_sender_in_another_process_reports_its_end(ring_of_a_stranger: Ring) -> None:
    """The receiver sees the end of the blob although this process still holds the sender's end."""
    sender, receiver = ring_of_a_stranger
    sender.write(b"all")
    sender.finish()
    assert received(receiver) == b"all" and receiver.read() == b""


def test_copied_bytes_do_not_change(ring_of_a_stranger: Ring) -> None:
    """A compromised sender must not change bytes after the receiver has hashed them."""
    sender, receiver = ring_of_a_stranger
    sender.write(b"hashed")
    part = receiver.read()
    sender._memory[:] = b"x" * ALL
    assert part == b"hashed"
    with pytest.raises(PermissionError):
        os.ftruncate(receiver.fds[0], 0)


@pytest.mark.parametrize(
    "block", [(BLOCKS, 5), (2**32 - 1, 2**32 - 1), (1, ALL)], ids=["next", "far", "large"]
)
def test_false_numbers_of_the_sender_stay_within_the_blocks(
    ring_of_a_stranger: Ring, block: tuple[int, int]
) -> None:
    sender, receiver = ring_of_a_stranger
    sender._full.write(struct.pack("=II", *block))
    assert 0 < len(receiver.read()) <= BLOCK_BYTES
