"""Tests the request that opens a session: valid requests, and the status of refused ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cri_server.streaming import upgrade
from cri_server.streaming.upgrade import Refused, RequestReader, UpgradeRequest

HOST = "Host: node:10250\r\n"
UPGRADE = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"


def read(text: str | bytes) -> UpgradeRequest:
    request = RequestReader().receive(text.encode() if isinstance(text, str) else text)
    assert request is not None
    return request


def refusal(text: str | bytes) -> int:
    with pytest.raises(Refused) as refused:
        read(text)
    return refused.value.status


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_bytes_after_the_request_are_kept(method: str) -> None:
    request = read(
        f"{method} /exec/token?x=1 HTTP/1.1\r\n{HOST}{UPGRADE}\r\n".encode() + b"\x80\x03rest"
    )
    assert (request.method, request.path, request.upgrade) == (method, "/exec/token", "spdy/3.1")
    assert request.ahead == b"\x80\x03rest"


def test_a_request_received_byte_by_byte_is_parsed_alike() -> None:
    text = f"POST /attach/t HTTP/1.1\r\n{HOST}{UPGRADE}Content-Length: 0\r\n\r\n".encode()
    reader = RequestReader()
    for byte in text[:-1]:
        assert reader.receive(bytes((byte,))) is None
    request = reader.receive(text[-1:])
    assert request is not None and request.path == "/attach/t"


def test_an_upgrade_needs_both_headers() -> None:
    assert read(f"GET / HTTP/1.1\r\n{HOST}Upgrade: websocket\r\n\r\n").upgrade == ""
    assert (
        read(
            f"GET / HTTP/1.1\r\n{HOST}Connection: keep-alive, upgrade\r\nUpgrade: WebSocket\r\n\r\n"
        ).upgrade
        == "websocket"
    )


@pytest.mark.parametrize(
    ("text", "status"),
    [
        pytest.param(f"GET / HTTP/1.0\r\n{HOST}\r\n", 400, id="HTTP/1.0"),
        pytest.param("GET / HTTP/1.1\r\n\r\n", 400, id="no Host"),
        pytest.param(f"GET / HTTP/1.1\r\n{HOST}{HOST}\r\n", 400, id="two Hosts"),
        pytest.param("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, id="a path as Host"),
        pytest.param("GET / HTTP/1.1\r\nHost:\r\n\r\n", 400, id="empty Host"),
        pytest.param(f"GET http://[::1 HTTP/1.1\r\n{HOST}\r\n", 400, id="half an IPv6 address"),
        pytest.param(f"POST / HTTP/1.1\r\n{HOST}Content-Length: 5\r\n\r\nhello", 400, id="a body"),
        pytest.param(
            f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            id="chunks",
        ),
        pytest.param(
            f"POST / HTTP/1.1\r\n{HOST}Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
            400,
            id="two lengths",
        ),
        pytest.param("nonsense\r\n\r\n", 400, id="nonsense"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
        pytest.param(f"GET / HTTP/1.1\r\n{HOST}" + "A: b\r\n" * 5000, 431, id="many headers"),
        pytest.param(f"GET / HTTP/1.1\r\n{HOST}A: " + "b" * 20_000, 431, id="a long header"),
        pytest.param("GET /" + "a" * 20_000, 431, id="a long path"),
    ],
)
def test_invalid_requests_are_refused_with_their_status(text: str | bytes, status: int) -> None:
    assert refusal(text) == status


@pytest.mark.parametrize(
    "origin", ["https://node:10250", "http://elsewhere", "null", "http://[::1"]
)
def test_the_origin_header_is_ignored(origin: str) -> None:
    read(f"GET / HTTP/1.1\r\n{HOST}Origin: {origin}\r\n\r\n")


@pytest.mark.requirement("9.2")
def test_the_first_common_protocol_of_the_client_is_chosen() -> None:
    request = read(
        f"GET / HTTP/1.1\r\n{HOST}X-Stream-Protocol-Version: v9, v3.x\r\nX-Stream-Protocol-Version:"
        " v4.x\r\n\r\n"
    )
    assert upgrade.choose_stream_protocol(request, ("v4.x", "v3.x")) == "v3.x"


@pytest.mark.requirement("9.2")
def test_a_request_without_a_common_protocol_is_refused() -> None:
    request = read(f"GET / HTTP/1.1\r\n{HOST}X-Stream-Protocol-Version: v9\r\n\r\n")
    with pytest.raises(Refused) as refused:
        upgrade.choose_stream_protocol(request, ("v4.x", "v3.x"))
    assert refused.value.status == 403
    assert b"X-Accepted-Stream-Protocol-Versions: v4.x\r\n" in refused.value.response()
    with pytest.raises(Refused) as refused:
        upgrade.choose_stream_protocol(read(f"GET / HTTP/1.1\r\n{HOST}\r\n"), ("v4.x",))
    assert refused.value.status == 400


def websocket(*fields: str, method: str = "GET") -> UpgradeRequest:
    return read(
        f"{method} / HTTP/1.1\r\n{HOST}Connection: Upgrade\r\nUpgrade: websocket\r\n"
        + "".join(f"{f}\r\n" for f in fields)
        + "\r\n"
    )


KEY, VERSION = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"


def test_the_websocket_response_is_that_of_the_rfc() -> None:
    answer = upgrade.switch_to_websocket(websocket(KEY, VERSION), "chat")
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer  # RFC 6455, 1.3
    assert b"Sec-WebSocket-Protocol: chat\r\n" in answer
    assert answer.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    "request_",
    [
        websocket(VERSION),
        websocket(KEY),
        websocket(KEY, "Sec-WebSocket-Version: 8"),
        websocket("Sec-WebSocket-Key: short", VERSION),
        websocket(KEY, VERSION, method="POST"),
    ],
)
def test_an_invalid_websocket_handshake_is_refused(request_: UpgradeRequest) -> None:
    with pytest.raises(Refused) as refused:
        upgrade.switch_to_websocket(request_, "")
    assert refused.value.status == 400


def test_the_subprotocol_is_negotiated() -> None:
    offered = websocket("Sec-WebSocket-Protocol: x, v4", "Sec-WebSocket-Protocol: v5")
    assert upgrade.choose_subprotocol(offered, ("v5", "v4")) == "v4"
    assert upgrade.choose_subprotocol(websocket(), ("v5",)) == ""
    with pytest.raises(Refused):
        upgrade.choose_subprotocol(offered, ("v6",))


PIECES = st.sampled_from(
    [
        b"GET ",
        b"POST ",
        b"/exec/t",
        b" HTTP/1.1",
        b"\r\n",
        b"\n",
        b"Host: a",
        b": ",
        b"Upgrade: SPDY/3.1",
        b"Connection: upgrade",
        b"Content-Length: 0",
        b"Content-Length: -1",
        b"Transfer-Encoding: chunked",
        b"\0",
        b"\xff",
        b" ",
        b"\r\n\r\n",
    ]
)


@given(pieces=st.lists(PIECES | st.binary(max_size=20), max_size=40))
@settings(max_examples=800, deadline=None)
def test_random_bytes_are_refused_or_incomplete(pieces: list[bytes]) -> None:
    reader = RequestReader()
    try:
        for piece in pieces:
            if reader.receive(piece) is not None:
                return
    except Refused as refused:
        assert refused.status in (400, 403, 431)
        assert refused.response().startswith(b"HTTP/1.1 4")
