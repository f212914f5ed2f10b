"""Tests the SPDY core with a client's core, with bytes from the SPDY draft, and with invalid
bytes."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cri_server.streaming.spdy import frames
from cri_server.streaming.spdy.connection import (
    CONTROL_LIMIT_BYTES,
    ConnectionFailed,
    Event,
    SpdyConnection,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamReset,
)
from cri_server.streaming.spdy.frames import Status, Type
from cri_server.streaming.spdy.headers import (
    BLOCK_LIMIT_BYTES,
    DICTIONARY,
    Headers,
    MalformedHeaders,
    Packer,
    Unpacker,
)
from tests.support.spdy import GoneAway, Pong, Replied, SpdyClient, syn_stream


def pair() -> tuple[SpdyClient, SpdyConnection]:
    return SpdyClient(), SpdyConnection()


def opened(**headers: str) -> tuple[SpdyClient, SpdyConnection, int]:
    """Return a client and a server with one stream open in both directions."""
    client, server = pair()
    stream = client.open(
        {name: [value] for name, value in (headers or {"streamtype": "error"}).items()}
    )
    server.receive(client.data_to_send())
    server.reply(stream)
    client.receive(server.data_to_send())
    return client, server, stream


def failed(events: list[Event]) -> str:
    assert events and isinstance(events[-1], ConnectionFailed), events
    return events[-1].reason


def block(headers: Headers) -> bytes:
    return Packer().pack(headers)


# ---- layout ----


@pytest.mark.requirement("9.3")
def test_the_dictionary_is_that_of_spdy_3() -> None:
    assert zlib.adler32(DICTIONARY) == 0xE3C6A7C2
    assert len(DICTIONARY) == 1423


@pytest.mark.requirement("9.3", "14.4")
def test_frames_have_the_bytes_of_the_draft() -> None:
    assert frames.data_head(3, 5, True) == b"\0\0\0\x03\x01\0\0\x05"
    assert frames.ping(1) == b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x01"
    assert frames.rst_stream(5, Status.CANCEL) == b"\x80\x03\0\x03\0\0\0\x08\0\0\0\x05\0\0\0\x05"
    assert frames.goaway(7, 0) == b"\x80\x03\0\x07\0\0\0\x08\0\0\0\x07\0\0\0\0"
    assert syn_stream(1, b"xyz", fin=True) == (
        b"\x80\x03\0\x01\x01\0\0\x0d\0\0\0\x01\0\0\0\0\0\0" + b"xyz"
    )
    assert frames.syn_reply(1, b"xyz") == b"\x80\x03\0\x02\0\0\0\x07\0\0\0\x01" + b"xyz"


def test_a_header_block_has_the_bytes_of_the_draft() -> None:
    plain = zlib.decompressobj(zdict=DICTIONARY).decompress(block({"StreamType": ["a", "b"]}))
    assert plain == b"\0\0\0\x01\0\0\0\x0astreamtype\0\0\0\x03a\0b"


@pytest.mark.requirement("9.3")
def test_header_compression_keeps_its_state() -> None:
    packer, unpacker = Packer(), Unpacker()
    blocks = [
        packer.pack({"streamtype": ["data"], "port": ["80"], "requestid": [str(n)]})
        for n in range(50)
    ]
    assert [unpacker.unpack(b)["requestid"] for b in blocks] == [[str(n)] for n in range(50)]
    assert len(blocks[-1]) < len(blocks[0])


# ---- two sides ----


def test_a_stream_is_opened_used_and_ended() -> None:
    client, server = pair()
    stream = client.open({"Streamtype": ["stdin"]})
    assert server.receive(client.data_to_send()) == [
        StreamOpened(1, {"streamtype": ["stdin"]}, False)
    ]
    server.reply(stream)
    assert client.receive(server.data_to_send()) == [Replied(1, {}, False)]
    assert server.receive(client.data_head(stream, 3) + b"abc") == [StreamData(1, b"abc", False)]
    assert server.receive(client.data_head(stream, 0, fin=True)) == [StreamData(1, b"", True)]
    assert client.receive(server.data_head(stream, 2, fin=True) + b"de") == [
        StreamData(1, b"de", True)
    ]
    assert not client.is_open(stream) and not server.is_open(stream)


@pytest.mark.requirement("9.3")
@pytest.mark.parametrize("first", ["client", "server"])
def test_either_side_may_end_first(first: str) -> None:
    client, server, stream = opened()
    sides = [client, server] if first == "client" else [server, client]
    for sender, receiver in (sides, reversed(sides)):
        assert receiver.receive(sender.data_head(stream, 1, fin=True) + b"x") == [
            StreamData(stream, b"x", True)
        ]
        with pytest.raises(StreamClosed):
            sender.data_head(stream, 1)
    assert not client.is_open(stream) and not server.is_open(stream)


def test_the_client_has_odd_and_the_server_even_ids() -> None:
    client, server = pair()
    assert [client.open({}), client.open({}), client.ping(), client.ping()] == [1, 3, 1, 3]
    server.receive(client.data_to_send())
    assert server.data_to_send() == frames.ping(1) + frames.ping(3)
    assert server.receive(frames.ping(2)) == [] == list(server.data_to_send())
    assert "stream id 2" in failed(server.receive(syn_stream(2, client._packer.pack({}))))


@pytest.mark.requirement("9.3")
def test_pings_are_answered() -> None:
    client, server = pair()
    ping = client.ping()
    assert server.receive(client.data_to_send()) == []
    assert client.receive(server.data_to_send()) == [Pong(ping)]


def test_a_reset_ends_both_directions() -> None:
    client, server, stream = opened()
    server.reset(stream, Status.CANCEL)
    assert client.receive(server.data_to_send()) == [StreamReset(stream, Status.CANCEL)]
    for side in (client, server):
        with pytest.raises(StreamClosed):
            side.data_head(stream, 1)
    server.reset(stream, Status.CANCEL)
    assert server.data_to_send() == b""
    # What was on its way when the reset came is not an error.
    assert server.receive(frames.data_head(stream, 3, False) + b"abc" + frames.ping(1)) == []
    assert server.data_to_send() == frames.ping(1)


def test_goaway_refuses_only_new_streams() -> None:
    client, server, stream = opened()
    server.go_away()
    assert client.receive(server.data_to_send()) == [GoneAway(stream, 0)]
    late = client.open({})
    assert server.receive(client.data_to_send()) == []
    assert client.receive(server.data_to_send()) == [StreamReset(late, Status.REFUSED_STREAM)]
    assert server.receive(client.data_head(stream, 1) + b"x") == [StreamData(stream, b"x", False)]


def test_a_probe_frame_has_no_effect() -> None:
    client, server, stream = opened()
    server.probe()
    sent = server.data_to_send()
    assert sent == frames.data_head(stream, 0, False)
    assert client.receive(sent) == []
    SpdyConnection().probe()


def test_unknown_frames_are_skipped() -> None:
    _, server, stream = opened()
    setting = struct.pack(">III", 1, 4, 100)
    window = struct.pack(">II", stream, 1 << 20)
    received = (
        frames.control(Type.SETTINGS, 0, setting)
        + frames.control(Type.WINDOW_UPDATE, 0, window)
        + struct.pack(">HHI", 0x8003, 99, 4)
        + b"none"
    )
    assert server.receive(received) == []
    assert server.data_to_send() == b""


def test_a_headers_frame_can_end_a_stream() -> None:
    _, server, stream = opened()
    packer = Packer()
    packer.pack({"streamtype": ["error"]})
    late = frames.control(
        Type.HEADERS, frames.FIN, struct.pack(">I", stream) + packer.pack({"late": ["yes"]})
    )
    assert server.receive(late) == [StreamData(stream, b"", True)]


# ---- any cut ----


def conversation() -> tuple[bytes, list[Event]]:
    """Return the bytes of a client's whole session, and the server's events for them."""
    client, server = pair()
    sent = b""
    for role in ("error", "stdin", "stdout"):
        client.open({"streamtype": [role]})
        sent += client.data_to_send()
    client.ping()
    sent += client.data_to_send()
    for data in (b"", b"x" * 700, b"y"):
        sent += client.data_head(3, len(data)) + data
    sent += client.data_head(3, 2, fin=True) + b"zz"
    client.reset(5, Status.CANCEL)
    client.go_away()
    sent += client.data_to_send()
    return sent, joined(server.receive(sent))


def joined(events: list[Event]) -> list[Event]:
    """Return the events, with consecutive data events of a stream joined, because cuts may split
    data."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if (
            isinstance(event, StreamData)
            and isinstance(last, StreamData)
            and last.stream_id == event.stream_id
            and not last.fin
        ):
            result[-1] = StreamData(last.stream_id, last.data + event.data, event.fin)
        else:
            result.append(event)
    return result


def test_input_byte_by_byte_has_the_same_events() -> None:
    sent, expected = conversation()
    server = SpdyConnection()
    events = [event for byte in sent for event in server.receive(bytes((byte,)))]
    assert joined(events) == expected
    assert server.data_to_send() == frames.ping(1)


@given(cuts=st.lists(st.integers(min_value=1, max_value=400)))
@settings(max_examples=200, deadline=None)
def test_input_cut_at_any_byte_has_the_same_events(cuts: list[int]) -> None:
    sent, expected = conversation()
    server = SpdyConnection()
    events: list[Event] = []
    for size in cuts:
        events += server.receive(sent[:size])
        sent = sent[size:]
    assert joined(events + server.receive(sent)) == expected


# ---- what a peer must not do ----

_packer = Packer()
SYN = syn_stream(1, _packer.pack({"streamtype": ["error"]}))
SAME_SYN = syn_stream(1, _packer.pack({"streamtype": ["error"]}))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(frames.data_head(1, 3, False) + b"abc", "never opened", id="data before SYN"),
        pytest.param(frames.data_head(0, 0, True), "never opened", id="data on stream 0"),
        pytest.param(
            frames.data_head(2, 0, True), "never opened", id="data on a stream of ours that is not"
        ),
        pytest.param(syn_stream(2, block({})), "stream id 2", id="even id"),
        pytest.param(syn_stream(0, block({})), "stream id 0", id="id 0"),
        pytest.param(SYN + SAME_SYN, "stream id 1 after 1", id="id again"),
        pytest.param(struct.pack(">HHI", 0x8002, 1, 10) + bytes(10), "version 2", id="version 2"),
        pytest.param(
            struct.pack(">HHI", 0x8003, 1, 9) + bytes(9), "too short", id="short SYN_STREAM"
        ),
        pytest.param(
            struct.pack(">HHI", 0x8003, 2, 3) + bytes(3), "too short", id="short SYN_REPLY"
        ),
        pytest.param(
            struct.pack(">HHI", 0x8003, 3, 4) + bytes(4), "RST_STREAM", id="short RST_STREAM"
        ),
        pytest.param(struct.pack(">HHI", 0x8003, 6, 5) + bytes(5), "PING", id="long PING"),
        pytest.param(struct.pack(">HHI", 0x8003, 7, 4) + bytes(4), "GOAWAY", id="short GOAWAY"),
        pytest.param(
            struct.pack(">HHI", 0x8003, 4, CONTROL_LIMIT_BYTES + 1),
            "control frame of",
            id="oversized",
        ),
        pytest.param(syn_stream(1, b"\xff" * 20), "header block", id="not zlib"),
        pytest.param(
            syn_stream(1, zlib.compress(b"\0\0\0\0")), "header", id="without the dictionary"
        ),
    ],
)
def test_a_protocol_error_ends_the_connection(sent: bytes, reason: str) -> None:
    server = SpdyConnection()
    assert reason in failed(server.receive(sent))
    out = server.data_to_send()
    assert out.endswith(struct.pack(">I", 1)) and struct.pack(">HHI", 0x8003, 7, 8) in out
    assert server.receive(SYN) == [] and server.data_to_send() == b""


def test_the_goaway_names_the_last_stream() -> None:
    server = SpdyConnection()
    server.receive(SYN)
    failed(server.receive(b"\x80\x09" + bytes(6)))
    assert server.data_to_send() == frames.goaway(1, 1)


def test_data_after_the_end_resets_the_stream() -> None:
    client, server, stream = opened()
    server.receive(client.data_head(stream, 0, fin=True))
    late = frames.data_head(stream, 4, False) + b"late"
    assert server.receive(late) == [StreamReset(stream, Status.STREAM_ALREADY_CLOSED)]
    assert server.data_to_send() == frames.rst_stream(stream, Status.STREAM_ALREADY_CLOSED)
    assert server.receive(late) == [] and server.data_to_send() == b""


def test_open_streams_are_limited_and_ended_streams_are_forgotten() -> None:
    client, server = SpdyClient(), SpdyConnection(streams_limit=2)
    streams = [client.open({}) for _ in range(3)]
    assert [
        e.stream_id for e in server.receive(client.data_to_send()) if isinstance(e, StreamOpened)
    ] == streams[:2]
    assert client.receive(server.data_to_send()) == [StreamReset(streams[2], Status.REFUSED_STREAM)]
    client.reset(streams[0], Status.CANCEL)
    client.open({})
    assert [type(e) for e in server.receive(client.data_to_send())] == [StreamReset, StreamOpened]


def test_unidirectional_streams_are_refused() -> None:
    sent = bytearray(SYN)
    sent[4] = frames.UNIDIRECTIONAL
    server = SpdyConnection()
    assert server.receive(bytes(sent)) == []
    assert server.data_to_send() == frames.rst_stream(1, Status.PROTOCOL_ERROR)


def raw_block(*pairs: tuple[bytes, bytes], count: int | None = None, tail: bytes = b"") -> bytes:
    plain = struct.pack(">I", len(pairs) if count is None else count)
    for name, value in pairs:
        plain += struct.pack(">I", len(name)) + name + struct.pack(">I", len(value)) + value
    stream = zlib.compressobj(zdict=DICTIONARY)
    return stream.compress(plain + tail) + stream.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(raw_block((b"Name", b"x")), id="upper case"),
        pytest.param(raw_block((b"", b"x")), id="no name"),
        pytest.param(raw_block((b"a", b"x"), (b"a", b"y")), id="twice"),
        pytest.param(raw_block((b"a", b"\xff\xfe")), id="not text"),
        pytest.param(raw_block(count=1), id="missing pair"),
        pytest.param(raw_block(count=2**32 - 1), id="four billion pairs"),
        pytest.param(raw_block((b"a", b"x"), tail=b"y"), id="more behind"),
        pytest.param(raw_block(tail=b"\0"), id="a byte behind"),
        pytest.param(
            raw_block(count=1, tail=b"\0\0\0\x01a\xff\xff\xff\xff"), id="longer than the block"
        ),
        pytest.param(raw_block((b"a", b"x" * BLOCK_LIMIT_BYTES)), id="too large"),
        pytest.param(b"", id="empty"),
    ],
)
def test_malformed_headers_are_refused(sent: bytes) -> None:
    with pytest.raises(MalformedHeaders):
        Unpacker().unpack(sent)


def test_a_zlib_bomb_uses_little_memory() -> None:
    bomb = raw_block((b"a", bytes(20_000_000)))
    assert len(bomb) < CONTROL_LIMIT_BYTES
    unpacked = Unpacker()
    with pytest.raises(MalformedHeaders, match="exceeds"):
        unpacked.unpack(bomb)
    assert "exceeds" in failed(SpdyConnection().receive(syn_stream(1, bomb)))


# ---- nonsense ----


def frames_of_nonsense() -> st.SearchStrategy[bytes]:
    """Return frames that look valid in part, with wrong ids, lengths, flags and bodies."""
    ids = st.integers(0, 8) | st.integers(0, 2**31 - 1)
    small = st.binary(max_size=40)
    blocks = small | st.just(block({"streamtype": ["data"]}))
    flags = st.sampled_from([0, 1, 2, 3, 255])
    kinds = st.integers(0, 12)
    control = st.builds(
        lambda k, f, i, b: frames.control(k, f, struct.pack(">I", i) + b), kinds, flags, ids, blocks
    )
    syn = st.builds(lambda i, b, f: syn_stream(i, b, fin=f), ids, blocks, st.booleans())
    data = st.builds(
        lambda i, b, f, extra: frames.data_head(i, len(b) + extra, f) + b,
        ids,
        small,
        st.booleans(),
        st.sampled_from([0, 0, 0, 5]),
    )
    short = st.builds(lambda k, b: frames.control(k, 0, b), kinds, small)
    return control | syn | data | short | small


@given(nonsense=st.lists(frames_of_nonsense(), max_size=30), whole=st.booleans())
@settings(max_examples=1500, deadline=None)
def test_invalid_frames_raise_nothing_and_use_little_memory(
    nonsense: list[bytes], whole: bool
) -> None:
    server = SpdyConnection(streams_limit=8)
    over = False
    for sent in [b"".join(nonsense)] if whole else nonsense:
        events = server.receive(sent)
        assert not (over and events), "events after the end"
        for event in events:
            assert not over
            over = isinstance(event, ConnectionFailed)
            if isinstance(event, StreamOpened):
                server.reply(event.stream_id)
        assert over == server.failed
        assert len(server._streams) <= 8
        assert len(server._partial) <= CONTROL_LIMIT_BYTES + 8
    out = list(split(server.data_to_send()))
    assert [kind for kind in out if kind == Type.GOAWAY] == [Type.GOAWAY] * over
    assert not over or out[-1] == Type.GOAWAY


def split(out: bytes) -> Iterator[int]:
    """Yield the types of the control frames in `out`."""
    while out:
        version, kind, rest = struct.unpack_from(">HHI", out)
        assert version == 0x8003
        yield kind
        out = out[8 + (rest & 0xFFFFFF) :]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_mutated_frames_raise_nothing() -> None:
    """Sessions with changed, missing and doubled bytes either fail with a GOAWAY or
    continue."""
    rng = random.Random(14)
    sent, _ = conversation()
    heads = ends = frames_seen = 0
    tracemalloc.start()
    while frames_seen < 1_000_000:
        mutated = bytearray(sent * rng.randrange(1, 4))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(mutated))
            match rng.randrange(3):
                case 0:
                    mutated[at] = rng.randrange(256)
                case 1:
                    del mutated[at : at + rng.randrange(1, 30)]
                case _:
                    mutated[at:at] = mutated[at : at + rng.randrange(1, 30)]
        server = SpdyConnection(streams_limit=8)
        events = server.receive(mutated)
        frames_seen += max(1, len(events))
        heads += bool(server.data_to_send())
        ends += server.failed
        assert server.failed == any(isinstance(event, ConnectionFailed) for event in events)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert heads and ends
    assert peak < 1 << 20
