"""`pyrunc-cri port-forward`: forwards local ports into a pod, through the streaming server.

Each TCP connection has its own WebSocket, because one WebSocket can carry only one connection for
each port.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, ownership
from cri_server.cli.connection.client import Client
from cri_server.cli.output.report import report
from cri_server.cli.streams import session
from pyrunc.errors import Error, InvalidArgument, NotFound

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
    metavar="ADDRESS",
    help="Local address; may be repeated. [127.0.0.1, and ::1 if this machine has IPv6]",
)
@click.pass_obj
def port_forward(address: str, pod: str, ports: tuple[str, ...], listen: tuple[str, ...]) -> None:
    """Forward local ports to ports of POD until interrupted. A port of POD is a number, or a name
    from the manifest. `:80` chooses a free local port."""
    for text in ports:
        split(text)
    with Client(address) as client, contextlib.ExitStack() as stack:
        identifier = client.pod(pod).id
        pairs = [parse(text, lambda name: named_port(client, identifier, name)) for text in ports]
        _open(client, identifier, pairs[0][1])  # reports an error before the first connection
        threads = []
        for local, remote in pairs:
            for listener in _listeners(listen, local):
                stack.enter_context(listener)
                host, number = listener.getsockname()[:2]
                click.echo(
                    f"Forwarding from {f'[{host}]' if ':' in host else host}:{number} -> {remote}"
                )
                serving = (client, identifier, remote, listener)
                threads.append(threading.Thread(target=_serve, args=serving, daemon=True))
        sys.stdout.flush()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def split(text: str) -> tuple[str | None, str]:
    """Split `80`, `8080:80` or `:http` into the texts of the local and the remote port. The local
    port of `80` is None, that of `:http` is "". Raises InvalidArgument."""
    match = re.fullmatch(r"(?:(\d{0,5}):)?(\d{1,5}|[a-z0-9-]{1,15})", text)
    local, remote = (match[1], match[2]) if match else (None, "")
    if (
        match is None
        or (remote.isdigit() and not 0 < int(remote) < 65536)
        or int(local or 0) > 65535
    ):
        raise InvalidArgument(f"{text!r} is not [LOCAL:]PORT")
    return local, remote


def parse(text: str, named: Callable[[str], int]) -> tuple[int, int]:
    """Parse `[LOCAL:]PORT` and return the local and the remote port number; local port 0 stands for
    any free port. `named`: returns the number of a named port. Raises InvalidArgument, and the
    errors of `named`."""
    local, name = split(text)
    remote = int(name) if name.isdigit() else named(name)
    return (remote if local is None else int(local or 0)), remote


def named_port(client: Client, pod: str, name: str) -> int:
    """Return the number of the pod's port that the manifest calls `name`. kubelet and `run` copy
    the manifest's ports into an annotation of each container. Raises NotFound."""
    ports = [
        port for container in client.containers(pod_sandbox_id=pod) for port in _ports(container)
    ]
    for port in ports:
        if port.get("name") == name and isinstance(port.get("containerPort"), int):
            return int(port["containerPort"])
    names = {str(port["name"]) for port in ports if port.get("name")}
    raise NotFound(
        f"the pod has no port named {name!r}; its named ports are:"
        f" {', '.join(sorted(names)) or '-'}"
    )


def _ports(container: api.Container) -> list[dict[str, Any]]:
    try:
        ports = json.loads(container.annotations.get(ownership.PORTS, "[]"))
    except ValueError:
        return []
    return [port for port in ports if isinstance(port, dict)] if isinstance(ports, list) else []


def _listeners(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return sockets that listen on `hosts`. Without hosts, listen on 127.0.0.1 and, if possible,
    on ::1 with the same port."""
    if hosts:
        return [_listener(host, port) for host in hosts]
    # kubectl listens on both, too: a client that resolves localhost to ::1 first would otherwise
    # reach another program or none.
    first = _listener("127.0.0.1", port)
    try:
        return [
            first,
            socket.create_server(
                ("::1", first.getsockname()[1]), family=socket.AF_INET6, backlog=BACKLOG
            ),
        ]
    except OSError:
        return [first]


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Error(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def _open(client: Client, pod: str, port: int) -> str:
    request = api.PortForwardRequest(pod_sandbox_id=pod, port=[port])
    return f"{client.call(request).url}?port={port}"


def _serve(client: Client, pod: str, port: int, listener: socket.socket) -> None:
    """Accept connections and forward each in its own thread, until `listener` is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_forward, args=(client, pod, port, connection), daemon=True).start()


def _forward(client: Client, pod: str, port: int, connection: socket.socket) -> None:
    """Forward one connection in both directions. An error is printed, and other connections
    continue."""
    try:
        with connection, session.connect(_open(client, pod, port), PROTOCOL) as channel:
            threading.Thread(target=_feed, args=(connection, channel), daemon=True).start()
            _receive(connection, channel)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
    except Error as error:
        report(str(error))


def _receive(connection: socket.socket, channel: Any) -> None:
    """Copy the pod's bytes to the connection, without the port number at the beginning of each
    channel. Raises Error with the server's message about a failure."""
    from websockets.exceptions import WebSocketException

    skip = {DATA: 2, ERROR: 2}  # bytes of the port, at the beginning of each channel
    failure = b""
    with contextlib.suppress(OSError, WebSocketException):
        while True:
            frame = channel.recv()
            number, content = frame[0], frame[1:]
            skipped = min(skip.get(number, 0), len(content))
            skip[number] = skip.get(number, 0) - skipped
            if number == DATA:
                connection.sendall(content[skipped:])
            else:
                failure += content[skipped:]
    if failure:
        raise Error(failure.decode(errors="replace"))


def _feed(connection: socket.socket, channel: Any) -> None:
    """Copy the local client's bytes to the pod until the client closes or the WebSocket breaks. The
    end of the client's bytes cannot be forwarded, because a WebSocket has no half-close."""
    with contextlib.suppress(Exception):
        while data := connection.recv(READ_BYTES):
            channel.send(bytes([DATA]) + data)
