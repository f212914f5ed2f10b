"""Opens WebSocket sessions of the streaming server, and reads their output."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any
from urllib.parse import urlparse

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from cri_server.api import api_pb2 as api
from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.kernel.namespace import setns
from tests.cri.server_harness import Server

STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255


def open_session(server: Server, url: str, protocol: str = "v5.channel.k8s.io") -> ClientConnection:
    """Open the session of the URL from inside the server's network namespace."""
    place: dict[str, Any] = {}

    def dial() -> None:
        namespace = os.open(f"/proc/{server.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(namespace, CLONE_NEWNET)
        finally:
            os.close(namespace)
        address = urlparse(url)
        place["socket"] = socket.create_connection((address.hostname, address.port), 30)

    thread = threading.Thread(target=dial)
    thread.start()
    thread.join()
    return connect(
        url.replace("http", "ws", 1),
        sock=place["socket"],
        subprotocols=[Subprotocol(protocol)],
        compression=None,
        proxy=None,
    )


def collect(session: ClientConnection) -> tuple[bytes, bytes, dict[str, Any]]:
    """Read the session to its end; return stdout, stderr and the final Status."""
    content: dict[int, bytearray] = {STDOUT: bytearray(), STDERR: bytearray(), ERROR: bytearray()}
    for message in session:
        data = message if isinstance(message, bytes) else message.encode()
        if data and data[0] in content:
            content[data[0]] += data[1:]
    return (
        bytes(content[STDOUT]),
        bytes(content[STDERR]),
        json.loads(bytes(content[ERROR]) or b"{}"),
    )


def exec_url(server: Server, container: str, *command: str, **streams: bool) -> str:
    request = api.ExecRequest(container_id=container, cmd=command, **streams)
    return str(server.runtime.Exec(request).url)
