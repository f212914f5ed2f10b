"""Tests the HTTP server of the metrics: replies, refusals, and clients that are slow or silent."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cri_server.observability.telemetry import endpoint as module
from cri_server.observability.telemetry.endpoint import CONNECTIONS_LIMIT, Endpoint, Reply
from pyrunc.errors import WrongState


async def hello(accept: str) -> Reply:
    return Reply(200, f"hello {accept}\n".encode())


async def broken(accept: str) -> Reply:
    raise ZeroDivisionError("a bug with a secret")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[str]:
    path = str(tmp_path / "metrics.sock")
    endpoint = Endpoint(f"unix://{path}", {"/metrics": hello, "/broken": broken})
    await endpoint.start()
    yield path
    await endpoint.close()
    assert not os.path.exists(path)


async def ask(path: str, request: bytes) -> bytes:
    """Send a request; return all that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


def port_of(endpoint: Endpoint) -> int:
    """Return the TCP port that the kernel has chosen."""
    assert endpoint._server is not None
    return int(endpoint._server.sockets[0].getsockname()[1])


def get(path: str, method: str = "GET", more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()


async def test_requests_are_answered(served: str) -> None:
    assert stat.S_IMODE(os.stat(served).st_mode) == 0o660
    answer = await ask(served, get("/metrics?x=1", more="Accept: text/plain\r\n") + get("/metrics"))
    assert (
        answer.count(b"HTTP/1.1 200") == 2
        and b"hello text/plain\n" in answer
        and answer.endswith(b"hello \n")
    )
    head = await ask(served, get("/metrics", "HEAD"))
    assert b"content-length: 7" in head.lower() and head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (get("/metrics/"), 404),
        (get("/metrics", "POST", "Content-Length: 3\r\n") + b"abc", 405),
        (get("/broken"), 500),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (get("/" + "x" * 70_000), 431),
    ],
)
async def test_invalid_requests_are_refused(served: str, request_: bytes, status: int) -> None:
    answer = await ask(served, request_)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"secret" not in answer


async def test_silent_clients_are_disconnected(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(served)
    assert await reader.read() == b""
    writer.close()


async def test_a_flood_of_connections_is_bounded(served: str) -> None:
    flood = [await asyncio.open_unix_connection(served) for _ in range(CONNECTIONS_LIMIT + 5)]
    ended = [asyncio.ensure_future(reader.read()) for reader, _ in flood]
    done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
    assert done
    for _, writer in flood:
        writer.close()
    await asyncio.gather(*ended)
    assert b"200" in await ask(served, get("/metrics"))


async def test_the_oldest_idle_connections_are_closed_at_the_limit() -> None:
    """When idle connections exceed the limit, each request still gets a response, also the second
    on a connection."""
    endpoint = Endpoint("127.0.0.1:0", {"/metrics": hello})
    await endpoint.start()
    try:
        # Any local user can connect by TCP.
        idle = [
            await asyncio.open_connection("127.0.0.1", port_of(endpoint))
            for _ in range(CONNECTIONS_LIMIT + 5)
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(endpoint))
        for _ in range(2):
            writer.write(get("/metrics"))
            assert (await reader.readuntil(b"hello \n")).startswith(b"HTTP/1.1 200")
        assert [await reader.read() for reader, _ in idle[:6]] == [b""] * 6
        assert not idle[-1][0].at_eof()
        for _, each in [*idle, (reader, writer)]:
            each.close()
    finally:
        await endpoint.close()


async def test_tcp_is_served_and_an_address_in_use_is_an_error() -> None:
    first = Endpoint("127.0.0.1:0", {"/metrics": hello})
    await first.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(first))
        writer.write(get("/metrics", more="Connection: close\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        with pytest.raises(WrongState, match=f"metrics.address 127.0.0.1:{port_of(first)}: "):
            await Endpoint(f"127.0.0.1:{port_of(first)}", {}).start()
    finally:
        await first.close()


async def test_a_stale_socket_is_replaced_and_a_used_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    first = Endpoint(f"unix://{path}", {})
    await first.start()
    with pytest.raises(WrongState, match="another server listens"):
        await Endpoint(f"unix://{path}", {}).start()
    assert first._server is not None
    first._server.close()  # and leaves the socket, as a server that is killed
    if not path.exists():  # since Python 3.13 asyncio removes it
        path.touch()
        path.unlink()
    second = Endpoint(f"unix://{path}", {"/metrics": hello})
    await second.start()
    assert b"200" in await ask(str(path), get("/metrics"))
    await second.close()
