"""Tests the HTTP/2 core with the `h2` library as its client, and with frames that no library
writes.

Input is also fed one byte at a time, because its division into parts must not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import pytest

from cri_server.http2 import frames
from cri_server.http2.connection import Http2Connection
from cri_server.http2.events import Data, Drained, Event, Failed, Opened, PeerReady, Reset
from cri_server.http2.frames import END_HEADERS, END_STREAM, ErrorCode, head
from cri_server.http2.hpack import STATUS_200, literal
from cri_server.http2.limits import Http2Limits

REQUEST = [
    (":method", "POST"), (":scheme", "http"), (":path", "/runtime.v1.RuntimeService/Version"),
    (":authority", "localhost"), ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip
HELLO = frames.PREFACE + frames.settings({})
BLOCK = hpack.Encoder().encode(REQUEST)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Pair:
    """The server's connection and an `h2` client. `exchange` carries bytes in both directions, in
    parts of `cut` bytes, until none are left."""

    def __init__(self, cut: int = 1 << 20, limits: Http2Limits | None = None) -> None:
        self.cut = cut
        self.ours = Http2Connection(limits)
        self.client = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding=None)
        )
        self.client.initiate_connection()
        self.events: list[Event] = []
        self.client_events: list[h2.events.Event] = []

    def exchange(self) -> None:
        while True:
            up, down = self.client.data_to_send(), self.ours.data_to_send()
            if not up and not down:
                return
            for begin in range(0, len(up), self.cut):
                self.events += self.ours.receive(up[begin : begin + self.cut])
            for begin in range(0, len(down), self.cut):
                self.client_events += self.client.receive_data(down[begin : begin + self.cut])

    def request(self, body: bytes | None = b"body") -> int:
        stream_id = int(self.client.get_next_available_stream_id())
        self.client.send_headers(stream_id, REQUEST, end_stream=body is None)
        if body is not None:
            self.client.send_data(stream_id, body, end_stream=True)
        self.exchange()
        return stream_id

    def taken(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def body(self, stream_id: int) -> bytes:
        return b"".join(
            e.data
            for e in self.client_events
            if isinstance(e, h2.events.DataReceived) and e.stream_id == stream_id
        )

    def ended(self, stream_id: int) -> bool:
        return any(
            isinstance(e, h2.events.StreamEnded) and e.stream_id == stream_id
            for e in self.client_events
        )


@pytest.fixture(params=[1, 5, 1 << 20], ids=["bytewise", "by five", "whole"])
def pair(request: pytest.FixtureRequest) -> Pair:
    pair = Pair(request.param)
    pair.exchange()
    assert pair.taken() == [PeerReady()]
    return pair


def answer(pair: Pair, stream_id: int, body: bytes) -> None:
    pair.ours.send_headers(stream_id, STATUS_200)
    pair.ours.send_data(stream_id, body)
    pair.ours.send_headers(stream_id, literal(b"grpc-status", b"0"), end=True)
    pair.exchange()


def test_requests_get_responses(pair: Pair) -> None:
    for number in range(5):
        stream_id = pair.request(b"r%d" % number)
        opened, data = pair.taken()
        fields = [(n.encode(), v.encode()) for n, v in REQUEST]
        assert opened == Opened(stream_id, fields, False) and data == Data(
            stream_id, b"r%d" % number, True
        )
        answer(pair, stream_id, b"answer %d" % number)
        assert pair.body(stream_id) == b"answer %d" % number and pair.ended(stream_id)
        (trailers,) = [
            e
            for e in pair.client_events
            if isinstance(e, h2.events.TrailersReceived) and e.stream_id == stream_id
        ]
        assert list(trailers.headers or []) == [(b"grpc-status", b"0")]
    assert not pair.ours._streams


def test_requests_may_have_no_body_or_end_with_trailers(pair: Pair) -> None:
    assert pair.request(None) and pair.taken()[0].ended  # type: ignore[union-attr]
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, REQUEST)
    pair.client.send_data(stream_id, b"padded", pad_length=30)
    pair.client.send_headers(stream_id, [("x-trailer", "1")], end_stream=True)
    pair.exchange()
    assert pair.taken()[1:] == [Data(stream_id, b"padded", False), Data(stream_id, b"", True)]


def test_long_responses_wait_for_the_windows(pair: Pair) -> None:
    """When responses exceed the flow-control windows of the connection and of their streams, the
    rest is sent as the client enlarges the windows. The streams take turns."""
    bodies = {}
    for number in range(3):
        stream_id = pair.request()
        bodies[stream_id] = bytes([number]) * 100_000
        answer(pair, stream_id, bodies[stream_id])
    assert sum(len(pair.body(s)) for s in bodies) == 65535
    assert pair.ours.queued_bytes == 300_000 - 65535
    for _ in range(100):
        room = {s: len(pair.body(s)) for s in bodies}
        pair.client.increment_flow_control_window(20_000)
        for stream_id in bodies:
            if not pair.ended(stream_id):
                pair.client.increment_flow_control_window(7_000, stream_id)
        pair.exchange()
        if all(map(pair.ended, bodies)):
            break
        assert any(len(pair.body(s)) > room[s] for s in bodies)
    assert {s: pair.body(s) for s in bodies} == bodies
    assert pair.ours.queued_bytes == 0 and not pair.ours._streams


def test_a_smaller_initial_window_moves_open_streams_below_zero(pair: Pair) -> None:
    stream_id = pair.request()
    answer(pair, stream_id, b"x" * 100_000)
    pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
    pair.exchange()
    pair.client.increment_flow_control_window(100_000)
    pair.client.increment_flow_control_window(65_525, stream_id)
    pair.exchange()
    assert len(pair.body(stream_id)) == 65535
    pair.client.increment_flow_control_window(34_465, stream_id)
    pair.exchange()
    assert pair.body(stream_id) == b"x" * 100_000 and pair.ended(stream_id)


def test_a_larger_initial_window_is_acknowledged_before_its_use(pair: Pair) -> None:
    stream_id = pair.request()
    answer(pair, stream_id, b"x" * 70_000)
    pair.client.increment_flow_control_window(100_000)
    pair.exchange()
    pair.ours.receive(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
    assert pair.ours.data_to_send().startswith(
        frames.SETTINGS_ACK + head(70_000 - 65_535, frames.DATA, 0, stream_id)
    )


def test_larger_frames_are_sent_when_the_client_accepts_them(pair: Pair) -> None:
    pair.client.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: 60_000})
    pair.exchange()
    stream_id = pair.request()
    answer(pair, stream_id, b"x" * 50_000)
    sizes = [
        len(e.data or b"") for e in pair.client_events if isinstance(e, h2.events.DataReceived)
    ]
    assert sizes == [50_000]


def test_a_stream_of_messages_reports_when_its_buffer_is_empty(pair: Pair) -> None:
    stream_id = pair.request()
    pair.taken()
    pair.ours.send_headers(stream_id, STATUS_200)
    assert pair.ours.send_data(stream_id, b"x" * 1000)
    assert not pair.ours.send_data(stream_id, b"x" * 65_000)
    pair.exchange()
    assert pair.taken() == []
    pair.client.increment_flow_control_window(10_000)
    pair.client.increment_flow_control_window(10_000, stream_id)
    pair.exchange()
    assert pair.taken() == [Drained(stream_id)]
    pair.ours.send_headers(stream_id, literal(b"grpc-status", b"0"), end=True)
    pair.exchange()
    assert pair.ended(stream_id) and len(pair.body(stream_id)) == 66_000


def test_a_large_request_gets_window_updates(pair: Pair) -> None:
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, REQUEST)
    body = random.Random(1).randbytes(200_000)
    sent = 0
    pair.client.send_data(stream_id, body[:1000])
    pair.exchange()
    pair.ours.credit(stream_id, 200_000)
    pair.exchange()
    while sent < len(body) - 1000:
        room = min(
            16_000, pair.client.local_flow_control_window(stream_id), len(body) - 1000 - sent
        )
        assert room > 0
        begin = 1000 + sent
        pair.client.send_data(
            stream_id, body[begin : begin + room], end_stream=begin + room == len(body)
        )
        sent += room
        pair.exchange()
    assert b"".join(e.data for e in pair.taken() if isinstance(e, Data)) == body


def test_the_connections_window_is_enlarged_repeatedly(pair: Pair) -> None:
    pair = Pair(pair.cut, Http2Limits(window_bytes=70_000))
    pair.exchange()
    for _ in range(20):
        answer(pair, pair.request(b"x" * 16_000), b"")
    assert sum(len(e.data) for e in pair.taken() if isinstance(e, Data)) == 320_000


def test_a_reset_of_the_client_ends_the_stream(pair: Pair) -> None:
    stream_id = pair.request()
    answer(pair, pair.request(), b"")
    pair.ours.send_headers(stream_id, STATUS_200)
    pair.ours.send_data(stream_id, b"x" * 100_000)
    pair.exchange()
    pair.taken()
    pair.client.reset_stream(stream_id, ErrorCode.CANCEL)
    pair.exchange()
    assert pair.taken() == [Reset(stream_id, ErrorCode.CANCEL)]
    assert not pair.ours.is_open(stream_id) and pair.ours.queued_bytes == 0


def test_a_response_before_the_end_of_the_request_ends_both_directions(pair: Pair) -> None:
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, REQUEST)
    pair.exchange()
    pair.ours.send_headers(stream_id, STATUS_200 + literal(b"grpc-status", b"12"), end=True)
    sent = pair.ours.data_to_send()
    assert sent.endswith(frames.rst_stream(stream_id, ErrorCode.NO_ERROR))
    # What was on its way is ignored.
    pair.client.send_data(stream_id, b"late", end_stream=True)
    pair.taken()
    pair.events += pair.ours.receive(pair.client.data_to_send())
    assert pair.taken() == [] and not pair.ours.failed and not pair.ours._streams


@pytest.mark.parametrize("cut", [1, 1 << 20], ids=["bytewise", "whole"])
def test_goaway_lets_open_streams_finish(cut: int) -> None:
    """Streams that the client opens later are ignored, with all their frames."""
    connection = Http2Connection(clock=Clock())
    feed(connection, HELLO + request(1), cut)
    connection.go_away()
    connection.go_away()
    assert connection.data_to_send().endswith(frames.goaway(1, ErrorCode.NO_ERROR))
    late = (
        request(3)
        + data(3, b"x", END_STREAM)
        + frames.window_update(3, 5000)
        + frames.rst_stream(3, 8)
    )
    assert (
        feed(connection, late, cut) == []
        and not connection.failed
        and connection.data_to_send() == b""
    )
    assert feed(connection, data(1, b"body", END_STREAM), cut) == [Data(1, b"body", True)]
    connection.send_headers(1, STATUS_200, end=True)
    assert len(connection._streams) == 0 and connection.data_to_send()


def test_pings_are_answered(pair: Pair) -> None:
    pair.client.ping(b"12345678")
    pair.exchange()
    assert [
        e.ping_data for e in pair.client_events if isinstance(e, h2.events.PingAckReceived)
    ] == [b"12345678"]


def test_a_client_may_shrink_the_servers_header_table(pair: Pair) -> None:
    answer(pair, pair.request(), b"a")
    # The server's first block has announced that it keeps no table, so a smaller size has no
    # effect.
    pair.client.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
    pair.exchange()
    stream_id = pair.request()
    answer(pair, stream_id, b"b")
    assert pair.body(stream_id) == b"b"


# ---- what no library writes


def request(stream_id: int, flags: int = END_HEADERS, block: bytes = BLOCK) -> bytes:
    return head(len(block), frames.HEADERS, flags, stream_id) + block


def data(stream_id: int, body: bytes, flags: int = 0) -> bytes:
    return head(len(body), frames.DATA, flags, stream_id) + body


def plain(fields: list[tuple[str, str]]) -> bytes:
    return b"".join(literal(n.encode(), v.encode()) for n, v in fields)


BROKEN: dict[str, tuple[bytes, ErrorCode]] = {
    "HTTP/1.1": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "no settings": (frames.PREFACE + request(1), ErrorCode.PROTOCOL_ERROR),
    "no settings but a ping": (
        frames.PREFACE + head(8, frames.PING, 0, 0) + bytes(8),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "an ack before settings": (frames.PREFACE + frames.SETTINGS_ACK, ErrorCode.FRAME_SIZE_ERROR),
    "a long frame": (HELLO + head(16385, frames.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    "settings of 5 bytes": (
        HELLO + head(5, frames.SETTINGS, 0, 0) + bytes(5),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "settings of a stream": (HELLO + head(0, frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "an ack with a body": (
        HELLO + head(6, frames.SETTINGS, 1, 0) + bytes(6),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "push": (HELLO + frames.settings({frames.Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
    "small frames": (
        HELLO + frames.settings({frames.Setting.MAX_FRAME_SIZE: 100}),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a wide window": (
        HELLO + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "wider than can be": (
        HELLO + frames.window_update(0, (1 << 31) - 1),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "wider by nothing": (HELLO + frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "an update of 3 bytes": (
        HELLO + head(3, frames.WINDOW_UPDATE, 0, 0) + bytes(3),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "an update of no stream": (HELLO + frames.window_update(3, 100), ErrorCode.PROTOCOL_ERROR),
    "a reset of no stream": (HELLO + frames.rst_stream(3, 8), ErrorCode.PROTOCOL_ERROR),
    "a reset of the connection": (HELLO + frames.rst_stream(0, 8), ErrorCode.PROTOCOL_ERROR),
    "a short reset": (
        HELLO + request(1) + head(3, frames.RST_STREAM, 0, 1) + bytes(3),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a ping of 7 bytes": (
        HELLO + head(7, frames.PING, 0, 0) + bytes(7),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a ping of a stream": (HELLO + head(8, frames.PING, 0, 1) + bytes(8), ErrorCode.PROTOCOL_ERROR),
    "a goaway of a stream": (
        HELLO + head(8, frames.GOAWAY, 0, 1) + bytes(8),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a priority of 4 bytes": (
        HELLO + head(4, frames.PRIORITY, 0, 1) + bytes(4),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a promise": (HELLO + head(4, frames.PUSH_PROMISE, 4, 1) + bytes(4), ErrorCode.PROTOCOL_ERROR),
    "a continuation of nothing": (
        HELLO + head(0, frames.CONTINUATION, 4, 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "an even stream": (HELLO + request(2), ErrorCode.PROTOCOL_ERROR),
    "headers of the connection": (HELLO + request(0), ErrorCode.PROTOCOL_ERROR),
    "data of no stream": (HELLO + data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data of the connection": (HELLO + data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "a stream out of order": (HELLO + request(5) + request(3), ErrorCode.STREAM_CLOSED),
    "a ping within headers": (
        HELLO + request(1, 0) + head(8, frames.PING, 0, 0) + bytes(8),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers that another stream goes on with": (
        HELLO + request(1, 0) + head(0, frames.CONTINUATION, END_HEADERS, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "bad compression": (HELLO + request(1, block=b"\x80"), ErrorCode.COMPRESSION_ERROR),
    "too much padding": (
        HELLO + request(1) + data(1, b"\5abcd", frames.PADDED),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "padding without a length": (
        HELLO + request(1) + data(1, b"", frames.PADDED),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers too short for their priority": (
        HELLO + request(1, 0x24, b"abcd"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "continuations without end": (
        HELLO + request(1, 0) + head(0, frames.CONTINUATION, 0, 1) * 17,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "headers without end": (
        HELLO + request(1, 0) + (head(16000, frames.CONTINUATION, 0, 1) + bytes(16000)) * 5,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "pings without end": (
        HELLO + (head(8, frames.PING, 0, 0) + bytes(8)) * 2001,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "acks of pings without end": (
        HELLO + (head(8, frames.PING, 1, 0) + bytes(8)) * 2001,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "settings without end": (HELLO + frames.settings({}) * 101, ErrorCode.ENHANCE_YOUR_CALM),
    "priorities without end": (
        HELLO + (head(5, frames.PRIORITY, 0, 1) + bytes(5)) * 2001,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "unknown frames without end": (HELLO + head(0, 0x42, 0, 7) * 2001, ErrorCode.ENHANCE_YOUR_CALM),
    "empty data without end": (
        HELLO + request(1) + data(1, b"") * 2101,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "tiny updates without end": (
        HELLO + frames.window_update(0, 1) * 2001,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "rapid reset": (
        HELLO + b"".join(request(n) + frames.rst_stream(n, 8) for n in range(1, 803, 2)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "resets that the client makes us send": (
        HELLO + b"".join(request(n) + frames.window_update(n, 0) for n in range(1, 803, 2)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
}


def feed(connection: Http2Connection, sent: bytes, cut: int) -> list[Event]:
    events = []
    for begin in range(0, len(sent), cut):
        events += connection.receive(sent[begin : begin + cut])
    return events


@pytest.mark.parametrize("cut", [1, 1 << 20], ids=["bytewise", "whole"])
@pytest.mark.parametrize("name", BROKEN)
def test_connection_errors_end_the_connection(name: str, cut: int) -> None:
    sent, code = BROKEN[name]
    connection = Http2Connection(clock=Clock())
    events = feed(connection, sent, cut)
    failed = events[-1]
    assert isinstance(failed, Failed) and failed.code == code, failed
    assert connection.failed and len(connection._streams) == 0 and connection.queued_bytes == 0
    sent = connection.data_to_send()
    assert sent.endswith(failed.reason.encode()) and code.to_bytes(4, "big") in sent
    assert connection.receive(HELLO) == [] and connection.data_to_send() == b""


def test_resets_and_pings_below_the_limits_are_accepted() -> None:
    clock = Clock()
    connection = Http2Connection(clock=clock)
    connection.receive(HELLO)
    for number in range(1, 4001, 2):
        clock.now_s += 0.02
        connection.receive(request(number) + frames.rst_stream(number, 8))
        connection.receive((head(8, frames.PING, 0, 0) + bytes(8)) * 8)
        connection.data_to_send()
    assert not connection.failed


def test_a_client_that_measures_its_bandwidth_may_ping_with_every_call() -> None:
    connection = Http2Connection(clock=Clock())
    connection.receive(HELLO)
    for number in range(1, 20_001, 2):
        ping = head(8, frames.PING, 0, 0) + bytes(8)
        connection.receive(
            ping + request(number, END_HEADERS | END_STREAM) + frames.window_update(0, 10) * 4
        )
        connection.send_headers(number, STATUS_200, end=True)
        connection.data_to_send()
    assert not connection.failed


def test_a_client_that_is_sent_a_long_stream_may_ping_with_every_message() -> None:
    connection = Http2Connection(clock=Clock())
    connection.receive(HELLO + request(1, END_HEADERS | END_STREAM))
    connection.send_headers(1, STATUS_200)
    for _ in range(10_000):
        assert connection.send_data(1, b"event")
        ping = head(8, frames.PING, 0, 0) + bytes(8)
        connection.receive(ping + frames.window_update(0, 5) + frames.window_update(1, 5))
        connection.data_to_send()
    assert not connection.failed


MALFORMED = {
    "upper case": [*REQUEST, ("Upper", "x")],
    "an empty name": [*REQUEST, ("", "x")],
    "a colon in a name": [*REQUEST, ("a:b", "x")],
    "a line end in a value": [*REQUEST, ("x", "a\nb")],
    "a zero in a path": [(n, v + "\0") if n == ":path" else (n, v) for n, v in REQUEST],
    "a pseudo field behind others": [*REQUEST[3:], *REQUEST[:3]],
    "an unknown pseudo field": [(":status", "200"), *REQUEST],
    "a pseudo field twice": [(":path", "/"), *REQUEST],
    "an empty path": [(n, "" if n == ":path" else v) for n, v in REQUEST],
    "two lengths": [*REQUEST, ("content-length", "5"), ("content-length", "5")],
    "a negative length": [*REQUEST, ("content-length", "-5")],
    "no path": [f for f in REQUEST if f[0] != ":path"],
    "no method": [f for f in REQUEST if f[0] != ":method"],
    "no scheme": [f for f in REQUEST if f[0] != ":scheme"],
    "connection": [*REQUEST, ("connection", "close")],
    "te of more than trailers": [*REQUEST[:-1], ("te", "gzip")],
}
LENGTH = [*REQUEST, ("content-length", "5")]
STREAM_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    **{
        name: (request(1, block=plain(fields)), ErrorCode.PROTOCOL_ERROR)
        for name, fields in MALFORMED.items()
    },
    "data behind the end": (
        request(1, END_HEADERS | END_STREAM) + data(1, b"x"),
        ErrorCode.STREAM_CLOSED,
    ),
    "headers behind the end": (
        request(1, END_HEADERS | END_STREAM) + request(1, END_HEADERS | END_STREAM),
        ErrorCode.STREAM_CLOSED,
    ),
    "more than the length": (
        request(1, block=plain(LENGTH)) + data(1, b"123") * 2,
        ErrorCode.PROTOCOL_ERROR,
    ),
    "less than the length": (
        request(1, block=plain(LENGTH)) + data(1, b"123", END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "no body but a length": (
        request(1, END_HEADERS | END_STREAM, plain(LENGTH)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "trailers before the length": (
        request(1, block=plain(LENGTH)) + request(1, END_HEADERS | END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers in the middle": (request(1) + request(1), ErrorCode.PROTOCOL_ERROR),
    "more than the window": (request(1) + data(1, bytes(16384)) * 4, ErrorCode.FLOW_CONTROL_ERROR),
    "wider by nothing": (request(1) + frames.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "wider than can be": (
        request(1) + frames.window_update(1, (1 << 31) - 1),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("cut", [1, 1 << 20], ids=["bytewise", "whole"])
@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_errors_end_only_the_stream(name: str, cut: int) -> None:
    sent, code = STREAM_ERRORS[name]
    connection = Http2Connection(clock=Clock())
    feed(connection, HELLO, cut)
    connection.data_to_send()
    events = feed(connection, sent, cut)
    assert not connection.failed and len(connection._streams) == 0
    assert frames.rst_stream(1, code) in connection.data_to_send()
    if any(isinstance(e, Opened) for e in events):
        assert events[-1] == Reset(1, code)
    # Another stream is none the wiser, and late frames of the first are ignored.
    late = data(1, b"late") + frames.rst_stream(1, 8) + frames.window_update(1, 2000)
    assert [type(e) for e in feed(connection, late + request(3), cut)] == [Opened]


def test_a_body_must_have_its_content_length() -> None:
    connection = Http2Connection()
    connection.receive(HELLO + request(1, block=plain(LENGTH)) + data(1, b"12"))
    assert connection.receive(data(1, b"345", END_STREAM)) == [Data(1, b"345", True)]


def test_streams_beyond_the_limit_are_refused() -> None:
    connection = Http2Connection(replace(Http2Limits(), streams=3))
    events = connection.receive(HELLO + b"".join(request(n) for n in range(1, 11, 2)))
    assert [e.stream_id for e in events if isinstance(e, Opened)] == [1, 3, 5]
    sent = connection.data_to_send()
    assert all(frames.rst_stream(n, ErrorCode.REFUSED_STREAM) in sent for n in (7, 9))
    connection.receive(frames.rst_stream(1, 8))
    connection.unfinished_streams = 1  # the owner's work for it goes on
    assert connection.receive(request(11)) == []
    connection.unfinished_streams = 0
    assert len(connection.receive(request(13))) == 1


def test_headers_longer_than_the_limit_refuse_only_the_request() -> None:
    connection = Http2Connection()
    encoder = hpack.Encoder()
    long = encoder.encode([*REQUEST, *((f"x-{n}", "v" * 1000) for n in range(20))], huffman=False)
    first, rest = long[:16000], long[16000:]
    sent = (
        request(1, END_STREAM, first) + head(len(rest), frames.CONTINUATION, END_HEADERS, 1) + rest
    )
    ready, opened = connection.receive(HELLO + sent)
    assert ready == PeerReady() and opened == Opened(1, None, True)
    (event,) = connection.receive(request(3, block=encoder.encode(REQUEST)))
    assert isinstance(event, Opened) and event.fields is not None


def shuffled(chance: random.Random) -> bytes:
    """Return valid, invalid and mutated frames after a valid connection preface."""
    kinds: list[Callable[[int], bytes]] = [
        lambda n: request(n, chance.choice([4, 5, 0, 0x2C])),
        lambda n: data(n, chance.randbytes(chance.randrange(40)), chance.choice([0, 1, 8, 9])),
        lambda n: frames.window_update(n, chance.choice([0, 1, 70_000, (1 << 31) - 1])),
        lambda n: frames.rst_stream(n, 8),
        lambda n: head(8, frames.PING, chance.choice([0, 1]), chance.choice([0, n])) + bytes(8),
        lambda n: frames.settings(
            {frames.Setting.INITIAL_WINDOW_SIZE: chance.choice([0, 5, 1 << 20, 1 << 31])}
        ),
        lambda n: chance.randbytes(chance.randrange(1, 30)),
        lambda n: (
            head(chance.randrange(20), chance.randrange(12), chance.randrange(256), n) + bytes(20)
        ),
    ]
    stream = 1
    out = bytearray(HELLO)
    for _ in range(chance.randrange(1, 40)):
        stream += 2 * chance.randrange(2)
        frame = bytearray(
            chance.choices(kinds, [8, 8, 4, 2, 2, 1, 0.2, 0.5])[0](chance.choice([stream, 1, 0, 3]))
        )
        if chance.random() < 0.03 and frame:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        out += frame
    return bytes(out)


def test_input_cut_at_any_byte_has_the_same_result_and_raises_nothing() -> None:
    chance = random.Random(9113)
    endings = set()
    for _ in range(1500):
        sent = shuffled(chance)
        outcomes = []
        for cut in (len(sent), 1, chance.randrange(2, 60)):
            connection = Http2Connection(clock=Clock())
            outcomes.append(
                (feed(connection, sent, cut), connection.data_to_send(), len(connection._streams))
            )
        assert outcomes[0] == outcomes[1] == outcomes[2], sent.hex()
        last = outcomes[0][0][-1:]
        endings.add(last[0].code if last and isinstance(last[0], Failed) else None)
    assert {
        None,
        ErrorCode.PROTOCOL_ERROR,
        ErrorCode.FLOW_CONTROL_ERROR,
        ErrorCode.FRAME_SIZE_ERROR,
    } <= endings
