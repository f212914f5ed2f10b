"""`pyrunc-cri exec`: a command in a container, its streams over the streaming server's WebSocket.

Never ExecSync: that answers when the command has ended, and with no more than a message's 16 MiB of its output.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import sys
import termios
import threading
import tty as terminal
from collections.abc import Iterator
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.client import Client, ServerError

PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
READ_BYTES = 1 << 15


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-i", "--stdin", is_flag=True, help="Pass our stdin on.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.argument("container")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def exec_(address: str, stdin: bool, tty: bool, container: str, command: tuple[str, ...]) -> None:
    """Run COMMAND in CONTAINER (an id, a name, POD/NAME, or a pod's name); exits with its code."""
    with Client(address) as client:
        identifier = client.container(container).id
        request = api.ExecRequest(
            container_id=identifier, cmd=command, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = client.runtime("Exec", request).url
    sys.exit(session(url, stdin=stdin, tty=tty))


def session(url: str, *, stdin: bool, tty: bool) -> int:
    """Connect our stdio to the session behind `url` until it ends; its exit code. Raises ServerError."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect
    from websockets.typing import Subprotocol

    try:
        socket = connect(
            url.replace("http", "ws", 1),
            subprotocols=[Subprotocol(PROTOCOL)],
            max_size=None,
            compression=None,
            proxy=None,
        )
    except (OSError, WebSocketException) as error:
        raise ServerError(f"the session at {url} cannot be opened: {error}") from None
    with socket, _raw_terminal(tty and sys.stdin.isatty()):
        if tty:
            _send_size(socket)
            signal.signal(signal.SIGWINCH, lambda *_: _send_size(socket))
        if stdin:
            threading.Thread(target=_feed, args=(socket,), daemon=True).start()
        return _receive(socket)


def _receive(socket: Any) -> int:
    """Write what comes to our stdout and stderr; the exit code. Raises ServerError, OSError when ours cannot be written."""
    code = None
    for channel, content in _messages(socket):
        if channel in (STDOUT, STDERR):
            target = sys.stdout.buffer if channel == STDOUT else sys.stderr.buffer
            target.write(content)
            target.flush()
        elif channel == ERROR:
            code = exit_code(content)
    if code is None:
        raise ServerError("the session ended without the command's exit code")
    return code


def _messages(socket: Any) -> Iterator[tuple[int, bytes]]:
    """(channel, content) of each message that has content. Raises ServerError when the connection breaks."""
    from websockets.exceptions import ConnectionClosedOK, WebSocketException

    while True:
        try:
            message = socket.recv()
        except ConnectionClosedOK:
            return
        except (OSError, WebSocketException) as error:
            raise ServerError(f"the session broke: {error}") from None
        data = message if isinstance(message, bytes) else message.encode()
        if len(data) > 1:
            yield data[0], data[1:]


def exit_code(status: bytes) -> int:
    """The exit code in a metav1.Status. Raises ServerError for another failure."""
    try:
        found = json.loads(status)
        if found.get("status") == "Success":
            return 0
        for cause in (found.get("details") or {}).get("causes") or []:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise ServerError(str(found.get("message", "the session failed")))
    except (ValueError, AttributeError, KeyError):
        raise ServerError(f"the session's status is none: {status[:200]!r}") from None


def _feed(socket: Any) -> None:
    with contextlib.suppress(Exception):
        while data := os.read(0, READ_BYTES):
            socket.send(bytes([STDIN]) + data)
        socket.send(bytes([CLOSE, STDIN]))


def _send_size(socket: Any) -> None:
    try:
        rows, columns = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8))[:2]
    except OSError:
        return
    if rows and columns:
        with contextlib.suppress(Exception):
            socket.send(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": rows}).encode())


@contextlib.contextmanager
def _raw_terminal(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before = termios.tcgetattr(0)
    try:
        terminal.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
