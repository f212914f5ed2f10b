"""Tests WebSocket sessions as browsers and older clients, but not Go's client, open them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedOK, InvalidStatus

from cri_server.streaming.backend import ExecSessionOptions, PortForwardOptions
from cri_server.streaming.server import StreamingServer
from tests.cri.streaming.client import address_of


def open_websocket(url: str, *subprotocols: str, **options: Any) -> connect:
    names: Sequence[Any] | None = subprotocols or None
    return connect(
        url.replace("http", "ws", 1), subprotocols=names, proxy=None, compression=None, **options
    )


async def receive_all(client: ClientConnection) -> list[bytes]:
    """Return all messages that arrive until the server closes the connection normally."""
    messages = []
    with pytest.raises(ConnectionClosedOK):
        while True:
            message = await client.recv()
            messages.append(message.encode() if isinstance(message, str) else message)
    return messages


SHELL = ExecSessionOptions(
    "c",
    ("/bin/sh", "-c", "read line; echo got $line; exit 7"),
    stdin=True,
    stdout=True,
    stderr=True,
)


@pytest.mark.requirement("9.9")
async def test_a_client_without_a_subprotocol_gets_the_first_version(
    server: StreamingServer,
) -> None:
    async with open_websocket(server.url_for(SHELL)) as client, asyncio.timeout(10):
        assert client.subprotocol is None
        assert await client.recv() == b"\x01"
        await client.send(b"\x00this\n")
        assert await receive_all(client) == [
            b"\x01got this\n",
            b"\x03command terminated with exit code 7",
        ]


@pytest.mark.requirement("9.9")
async def test_a_base64_session_is_encoded(server: StreamingServer) -> None:
    name = "v4.base64.channel.k8s.io"
    async with open_websocket(server.url_for(SHELL), name) as client, asyncio.timeout(10):
        assert client.subprotocol == name
        assert await client.recv() == "1"
        await client.send("0" + base64.b64encode(b"this\n").decode())
        output, status = await receive_all(client)
        assert (output[:1], base64.b64decode(output[1:])) == (b"1", b"got this\n")
        assert status[:1] == b"3"
        assert json.loads(base64.b64decode(status[1:]))["details"]["causes"][0]["message"] == "7"


@pytest.mark.parametrize("origin", ["http://localhost/", "https://dashboard.example", "null"])
async def test_any_origin_is_accepted(server: StreamingServer, origin: str) -> None:
    """Origin and Host need not agree: the API server forwards the Origin of the user's client,
    kubelet the Host that the API server sent."""
    client = open_websocket(server.url_for(SHELL), "v4.channel.k8s.io", origin=origin)
    async with client as session, asyncio.timeout(10):
        await session.send(b"\x00this\n")
        assert b"\x01got this\n" in await receive_all(session)


async def test_an_origin_without_a_token_opens_nothing(server: StreamingServer) -> None:
    """A page of another site cannot open a session, because it cannot know the URL."""
    own = "http://{}:{}".format(*address_of(server))
    url = server.url_for(SHELL)
    with pytest.raises(InvalidStatus) as refused:
        await open_websocket(url[:-1] + ("A" if url[-1] != "A" else "B"), origin=own)
    assert refused.value.response.status_code == 404


@pytest.mark.requirement("9.11")
@pytest.mark.parametrize("name", ["", "v4.channel.k8s.io"])
async def test_channels_forward_ports(server: StreamingServer, name: str) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as service:
        port = service.sockets[0].getsockname()[1]
        url = server.url_for(PortForwardOptions("pod", (port, 1)))
        async with open_websocket(url, *filter(None, [name])) as client, asyncio.timeout(10):
            await client.send(b"\x00there\n")
            messages = await receive_all(client)
    assert messages[:4] == [
        bytes((n,)) + p.to_bytes(2, "little") for n, p in enumerate((port, port, 1, 1))
    ]
    assert sorted(messages[4:]) == [
        b"\x00hello there\n",
        b"\x03forwarding to port 1: connect 127.0.0.1:1: ECONNREFUSED",
    ]
