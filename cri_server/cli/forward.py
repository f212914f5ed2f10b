"""`pyrunc-cri port-forward`: ports of this machine that lead into a pod, through the streaming server.

Each connection is a WebSocket of its own, as CRI has one pair of channels per port and session.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import completion, session
from cri_server.cli.client import Client
from cri_server.cli.complaint import complain
from pyrunc.errors import Error, InvalidArgument

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
READ_BYTES = 1 << 15
BACKLOG = 64


@click.command("port-forward")
@click.argument("pod", shell_complete=completion.pods)
@click.argument("ports", nargs=-1, required=True, metavar="[LOCAL:]PORT...")
@click.option(
    "--address",
    "listen",
    multiple=True,
    default=["127.0.0.1"],
    show_default=True,
    metavar="ADDRESS",
    help="Where to listen; may be repeated.",
)
@click.pass_obj
def port_forward(address: str, pod: str, ports: tuple[str, ...], listen: tuple[str, ...]) -> None:
    """Forward local ports to ports of POD until interrupted. `:80` takes a free local port."""
    pairs = [parse(text) for text in ports]
    with Client(address) as client, contextlib.ExitStack() as stack:
        identifier = client.pod(pod).id
        _open(client, identifier, pairs[0][1])  # so that what cannot be forwarded is said now
        threads = []
        for local, remote in pairs:
            for host in listen:
                listener = stack.enter_context(_listener(host, local))
                name = "%s:%d" % listener.getsockname()[:2]
                click.echo(f"Forwarding from {name} -> {remote}")
                serving = (client, identifier, remote, listener)
                threads.append(threading.Thread(target=_serve, args=serving, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def parse(text: str) -> tuple[int, int]:
    """`80`, `8080:80`, `:80` -> (local, remote); 0 is any. Raises InvalidArgument."""
    found = re.fullmatch(r"(?:(\d{0,5}):)?(\d{1,5})", text)
    if found is None or not 0 < int(found[2]) < 65536 or int(found[1] or 0) > 65535:
        raise InvalidArgument(f"{text!r} is not [LOCAL:]PORT")
    remote = int(found[2])
    return (remote if found[1] is None else int(found[1] or 0)), remote


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Error(f"cannot listen at {host}:{port}: {error.strerror or error}") from None


def _open(client: Client, pod: str, port: int) -> str:
    request = api.PortForwardRequest(pod_sandbox_id=pod, port=[port])
    return f"{client.runtime('PortForward', request).url}?port={port}"


def _serve(client: Client, pod: str, port: int, listener: socket.socket) -> None:
    """Take connections until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_forward, args=(client, pod, port, connection), daemon=True).start()


def _forward(client: Client, pod: str, port: int, connection: socket.socket) -> None:
    """One connection, both ways. What goes wrong is said; the others go on."""
    try:
        with connection, session.connect(_open(client, pod, port), PROTOCOL) as channel:
            threading.Thread(target=_feed, args=(connection, channel), daemon=True).start()
            _receive(connection, channel)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
    except Error as error:
        complain(str(error))


def _receive(connection: socket.socket, channel: Any) -> None:
    """The pod's bytes; both channels begin with the port. Raises Error with what the server says has failed."""
    from websockets.exceptions import WebSocketException

    skip = {DATA: 2, ERROR: 2}
    failed = b""
    try:
        while True:
            message = channel.recv()
            number, content = message[0], message[1:]
            taken = min(skip.get(number, 0), len(content))
            skip[number] = skip.get(number, 0) - taken
            if number == DATA:
                connection.sendall(content[taken:])
            else:
                failed += content[taken:]
    except (OSError, WebSocketException):
        pass
    if failed:
        raise Error(failed.decode(errors="replace"))


def _feed(connection: socket.socket, channel: Any) -> None:
    """The client's bytes. A WebSocket has no half that could be closed: the pod ends the session."""
    with contextlib.suppress(Exception):
        while data := connection.recv(READ_BYTES):
            channel.send(bytes([DATA]) + data)
