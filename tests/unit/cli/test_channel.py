"""Tests the gRPC client with a server of grpcio, and with sockets whose replies are wrong or
missing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.cli.connection import channel as channels
from cri_server.cli.connection.channel import CallError, Channel
from cri_server.http2 import frames
from cri_server.rpc.codes import Code


class Peer(grpc.GenericRpcHandler):
    """Handles the gRPC calls `/s/echo`, `/s/fail`, `/s/wait` and `/s/count`."""

    def __init__(self) -> None:
        # Set when a call of wait or count is cancelled.
        self.cancelled = threading.Event()
        self.seconds_left: float | None = None

    def service(self, details: Any) -> Any:
        unary: dict[str, Callable[[bytes, Any], bytes]] = {
            "/s/echo": self._echo,
            "/s/fail": _fail,
            "/s/wait": self._wait,
        }
        if details.method in unary:
            return grpc.unary_unary_rpc_method_handler(unary[details.method])
        if details.method == "/s/count":
            return grpc.unary_stream_rpc_method_handler(self._count)
        return None

    def _echo(self, request: bytes, context: Any) -> bytes:
        self.seconds_left = context.time_remaining()
        return request

    def _wait(self, request: bytes, context: Any) -> bytes:
        context.add_callback(self.cancelled.set)
        self.cancelled.wait(60)
        return b""

    def _count(self, request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(self.cancelled.set)
        for number in range(int(request)):
            yield b"%d" % number * 1000
        if request == b"3":
            context.abort(grpc.StatusCode.DATA_LOSS, "after three")


def _fail(request: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, request.decode())
    raise AssertionError


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[Peer, Channel]]:
    handler = Peer()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(8), [handler], options=options)
    server.add_insecure_port(f"unix://{tmp_path}/s")
    server.start()
    channel = Channel(f"{tmp_path}/s")
    yield handler, channel
    channel.close()
    handler.cancelled.set()
    server.stop(None).wait()


@pytest.mark.parametrize("size", [0, 1, 16384, 70_000, 5 << 20])
def test_messages_of_every_size_pass_both_ways(peer: tuple[Peer, Channel], size: int) -> None:
    handler, channel = peer
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    for _ in range(3):
        assert channel.unary("/s/echo", content, 30.0) == content
    assert len(channel._idle) == 1, "one connection for all of them"
    assert handler.seconds_left is not None and 0 < handler.seconds_left <= 31
    assert channel.unary("/s/echo", b"", None) == b""
    assert handler.seconds_left is None or handler.seconds_left > 10**6


def test_errors_are_the_servers(peer: tuple[Peer, Channel]) -> None:
    _, channel = peer
    for message in ("plain", "50 % of ümläute\n\U0001f600", ""):
        with pytest.raises(CallError) as caught:
            channel.unary("/s/fail", message.encode(), 30.0)
        assert (caught.value.code, caught.value.details) == (Code.FAILED_PRECONDITION, message)
    with pytest.raises(CallError) as caught:
        channel.unary("/s/none", b"", 30.0)
    assert caught.value.code == Code.UNIMPLEMENTED
    assert channel.unary("/s/echo", b"fine", 30.0) == b"fine" and len(channel._idle) == 1


def test_streams_return_all_messages(peer: tuple[Peer, Channel]) -> None:
    handler, channel = peer
    numbers = list(
        channel.stream("/s/count", b"5000", lambda message: int(message[: len(message) // 1000]))
    )
    assert numbers == list(range(5000))
    messages = []
    with pytest.raises(CallError, match="after three"):
        for message in channel.stream("/s/count", b"3", bytes):
            messages.append(message)
    assert len(messages) == 3
    handler.cancelled.clear()
    with contextlib.closing(channel.stream("/s/count", b"100000000", bytes)) as stream:  # type: ignore[type-var]
        assert next(stream) == b"0" * 1000
    assert handler.cancelled.wait(30), "who leaves early has the server stop"


def test_a_call_is_cancelled_at_its_deadline(peer: tuple[Peer, Channel]) -> None:
    handler, channel = peer
    with pytest.raises(CallError) as caught:
        channel.unary("/s/wait", b"", 0.3)
    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert handler.cancelled.wait(30)


def test_threads_can_share_a_channel(peer: tuple[Peer, Channel]) -> None:
    _, channel = peer
    with futures.ThreadPoolExecutor(8) as pool:
        contents = [bytes([n]) * 100_000 for n in range(50)]
        assert (
            list(pool.map(lambda content: channel.unary("/s/echo", content, 60.0), contents))
            == contents
        )
    assert 1 <= len(channel._idle) <= 8


@contextlib.contextmanager
def listening(path: Path, *answers: Callable[[socket.socket], object]) -> Iterator[None]:
    """Listen on a socket: each of `answers` gets one connection, which stays open until the end."""
    connections = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def accept() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                connections.append(connection)
                answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield
        thread.join()
        for connection in connections:
            connection.close()


SETTINGS = frames.settings({})
WRONG = {
    "closed": (b"", "the connection was closed"),
    "http/1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak HTTP/2"),
    "long": (SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1", "a frame of"),
    "going away": (SETTINGS + frames.goaway(0, 0, b"too many"), "too many"),
    "reset": (SETTINGS + frames.rst_stream(1, 7), "reset with code 7"),
    "block": (SETTINGS + frames.head(1, frames.HEADERS, 4, 1) + b"\xff", "index"),
    "status": (SETTINGS + frames.head(1, frames.HEADERS, 5, 1) + b"\x8d", "HTTP status 404"),
    "data first": (SETTINGS + frames.head(0, frames.DATA, 1, 1), "without a status"),
    "stray": (SETTINGS + frames.head(0, frames.DATA, 1, 7), "unexpected frame"),
    "push": (
        SETTINGS + frames.head(4, frames.PUSH_PROMISE, 4, 1) + b"\0\0\0\2",
        "unexpected frame",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_servers_are_detected(tmp_path: Path, name: str) -> None:
    data, words = WRONG[name]

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    channel = Channel(f"{tmp_path}/s")
    with listening(tmp_path / "s", answer), pytest.raises(CallError, match=words):
        channel.unary("/s/echo", b"", 30.0)
    assert not channel._idle


def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CONNECT_TIMEOUT_S", 0.2)
    with (
        listening(tmp_path / "s", lambda connection: None),
        pytest.raises(CallError, match="no HTTP/2 settings"),
    ):
        Channel(f"{tmp_path}/s").unary("/s/echo", b"", None)
    with pytest.raises(CallError) as caught:
        Channel(f"{tmp_path}/none").unary("/s/echo", b"", None)
    assert caught.value.code == Code.UNAVAILABLE


def test_the_channel_reconnects_to_a_restarted_server(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def serve() -> grpc.Server:
        server = grpc.server(futures.ThreadPoolExecutor(2), [Peer()])
        server.add_insecure_port(f"unix://{path}")
        server.start()
        return server

    channel, server = Channel(str(path)), serve()
    assert channel.unary("/s/echo", b"1", 30.0) == b"1"
    server.stop(None).wait()
    deadline = time.monotonic() + 30
    # When the idle connection is broken, the next call makes another one.
    while channel._idle[0].usable() and time.monotonic() < deadline:
        time.sleep(0.01)
    server = serve()
    assert channel.unary("/s/echo", b"2", 30.0) == b"2"
    channel.close()
    server.stop(None).wait()
