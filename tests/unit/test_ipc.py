"""Tests messages with descriptors over a socket pair: all sizes, and packets that are no valid
messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrunc import ipc
from pyrunc.errors import PeerError
from pyrunc.kernel.fd import close_all

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        yield a, b


@pytest.mark.parametrize("size", [0, 1, 32_000, 32_768, 40_000, 250_000, 5_000_000])
def test_messages_of_any_size_arrive_whole_with_their_descriptors(pair: Pair, size: int) -> None:
    reading, writing = os.pipe()
    ipc.send(pair[0], {"text": "x" * size}, [reading, writing])
    received = ipc.receive(pair[1])
    assert received is not None
    message, fds = received
    assert message == {"text": "x" * size} and len(fds) == 2
    os.write(fds[1], b"through")
    assert os.read(reading, 100) == b"through"
    assert not any(os.get_inheritable(fd) for fd in fds)
    close_all([reading, writing, *fds])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_every_object_is_sent_and_received_unchanged(message: dict[str, object]) -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        ipc.send(a, message)
        assert ipc.receive(b) == (message, [])


def test_paths_that_are_not_utf8_survive(pair: Pair) -> None:
    path = os.fsdecode(b"/tmp/\xff\xfe")
    ipc.send(pair[0], {"path": path})
    received = ipc.receive(pair[1])
    assert received and os.fsencode(received[0]["path"]) == b"/tmp/\xff\xfe"


def test_receive_returns_none_at_the_end(pair: Pair) -> None:
    pair[0].close()
    assert ipc.receive(pair[1]) is None


def test_receive_without_a_message_would_block(pair: Pair) -> None:
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ipc.receive(pair[1])


@pytest.mark.parametrize("packet", [b"x", b"[]", b"1", b"{", b'{"a":', b"M", b"\xff\xff", b"{}{}"])
def test_an_invalid_message_is_a_peers_error_and_leaks_no_descriptor(
    pair: Pair, packet: bytes
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    socket.send_fds(pair[0], [packet], [0, 1])
    if packet == b"M":  # expected: a memfd with the text
        with pytest.raises((PeerError, OSError)):
            ipc.receive(pair[1])
    else:
        with pytest.raises(PeerError):
            ipc.receive(pair[1])
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_packet_that_is_too_long_is_refused(pair: Pair) -> None:
    pair[0].send(b'{"a":"' + b"x" * 100_000 + b'"}')
    with pytest.raises(PeerError, match="was truncated"):
        ipc.receive(pair[1])


def test_a_memfd_that_is_too_long_is_refused(pair: Pair) -> None:
    memory = os.memfd_create("message")
    os.ftruncate(memory, ipc.MESSAGE_LIMIT_BYTES + 1)
    socket.send_fds(pair[0], [b"M"], [memory])
    os.close(memory)
    with pytest.raises(PeerError, match="more than"):
        ipc.receive(pair[1])
