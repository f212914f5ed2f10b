"""Tests gRPC's framing: headers, messages in parts, statuses."""

from __future__ import annotations

import gzip
import re
from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cri_server.rpc import grpc_framing
from cri_server.rpc.codes import CallFailed, Code
from cri_server.rpc.grpc_framing import IncomingMessage, NotGrpc

FIELDS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b"content-type", b"application/grpc"),
]


def test_headers_are_parsed() -> None:
    head = grpc_framing.parse_head(
        [*FIELDS, (b"grpc-timeout", b"250m"), (b"grpc-encoding", b"gzip")]
    )
    assert (head.path, head.timeout_s, head.encoding) == (b"/a.B/C", 0.25, b"gzip")
    assert grpc_framing.parse_head(FIELDS).timeout_s is None


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [(b":method", b"GET", 405), (b"content-type", b"text/html", 415), (b"content-type", b"", 415)],
)
def test_requests_that_are_not_grpc(name: bytes, value: bytes, status: int) -> None:
    with pytest.raises(NotGrpc) as refused:
        grpc_framing.parse_head([(n, value if n == name else v) for n, v in FIELDS])
    assert refused.value.http_status == status


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"30S", 30),
        (b"99999999n", 0.099999999),
        (b"0u", 0),
        (b"5m", 0.005),
    ],
)
def test_timeouts_are_parsed(text: bytes, seconds: float) -> None:
    assert grpc_framing.parse_timeout_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"S", b"1", b"123456789S", b"-1S", b"1.5S", b"1s", b"1S\n"])
def test_malformed_timeouts_are_refused(text: bytes) -> None:
    with pytest.raises(CallFailed):
        grpc_framing.parse_timeout_s(text)


def collect(body: bytes, parts: int, encoding: bytes = b"identity", limit: int = 1 << 20) -> bytes:
    incoming = IncomingMessage(encoding, limit)
    for begin in range(0, len(body), parts):
        incoming.add(body[begin : begin + parts])
    return incoming.finish()


@given(st.binary(max_size=2000), st.integers(1, 700), st.booleans())
def test_messages_arrive_in_parts(payload: bytes, parts: int, compressed: bool) -> None:
    packed = gzip.compress(payload)
    body = (
        b"\1" + len(packed).to_bytes(4, "big") + packed
        if compressed
        else grpc_framing.message(payload)
    )
    assert collect(body, parts, b"gzip") == payload
    if not compressed:
        assert grpc_framing.whole_message(body) == payload
        assert (
            grpc_framing.whole_message(body + b"x") is None
            and grpc_framing.whole_message(body[:-1]) is None
        )


@pytest.mark.parametrize(
    ("body", "encoding", "code"),
    [
        (b"", b"identity", Code.UNIMPLEMENTED),
        (b"\0\0\0", b"identity", Code.INTERNAL),
        (b"\0\0\0\0\5abc", b"identity", Code.INTERNAL),
        (grpc_framing.message(b"a") + grpc_framing.message(b"b"), b"identity", Code.UNIMPLEMENTED),
        (b"\2\0\0\0\0", b"identity", Code.INTERNAL),
        (b"\1\0\0\0\1x", b"identity", Code.INTERNAL),
        (b"\1\0\0\0\1x", b"snappy", Code.UNIMPLEMENTED),
        (b"\1\0\0\0\1x", b"gzip", Code.INTERNAL),
        (b"\0\xff\xff\xff\xff", b"identity", Code.RESOURCE_EXHAUSTED),
    ],
)
def test_malformed_messages_are_refused(body: bytes, encoding: bytes, code: Code) -> None:
    for parts in (1, 7, 1000):
        with pytest.raises(CallFailed) as failed:
            collect(body, parts, encoding)
        assert failed.value.code == code


def test_a_gzip_bomb_stops_at_the_limit() -> None:
    packed = gzip.compress(b"\0" * (64 << 20))
    with pytest.raises(CallFailed) as failed:
        collect(b"\1" + len(packed).to_bytes(4, "big") + packed, 16384, b"gzip")
    assert failed.value.code == Code.RESOURCE_EXHAUSTED
    two = gzip.compress(b"a") + gzip.compress(b"b")
    with pytest.raises(CallFailed):
        collect(b"\1" + len(two).to_bytes(4, "big") + two, 16384, b"gzip")


def test_the_credit_for_a_long_message_is_returned_once() -> None:
    incoming = IncomingMessage(b"identity")
    assert incoming.add(b"\0\0\x10\0\0") == (1 << 20) + 5 - 65535
    assert incoming.add(b"x" * 1000) == 0


@given(st.text(max_size=300))
def test_status_messages_are_escaped_and_read_back(text: str) -> None:
    escaped = grpc_framing.escape(text)
    assert re.fullmatch(rb"[ -~]*", escaped)
    expected = text.encode("utf-8", "replace").decode()
    assert unquote(escaped.decode("ascii")) == expected


@given(st.text(alphabet="aé€😀%\n", min_size=1, max_size=12), st.integers(6000, 6300))
def test_long_status_messages_are_cut_between_characters(part: str, length: int) -> None:
    text = (part * length)[:length]
    escaped = grpc_framing.escape(text)
    assert len(escaped) <= grpc_framing.STATUS_MESSAGE_LIMIT_BYTES
    unescaped = unquote(escaped.decode("ascii"), errors="strict")
    assert unescaped == text or text.startswith(unescaped.removesuffix("..."))


def test_status_blocks_have_code_and_message() -> None:
    assert decoded(grpc_framing.status_block(Code.NOT_FOUND, "no such: é")) == {
        "grpc-status": "5",
        "grpc-message": "no such: %C3%A9",
    }
    assert decoded(grpc_framing.status_block(Code.OK, "ignored")) == {"grpc-status": "0"}


def decoded(block: bytes) -> dict[str, str]:
    return {str(name): str(value) for name, value in hpack.Decoder().decode(block)}
