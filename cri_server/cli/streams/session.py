"""A session of the streaming server over its WebSocket: our stdio joined to a process in a
container."""

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
import time
import tty as terminal
from collections.abc import Iterator
from socket import SHUT_RDWR
from typing import Any

import click

from cri_server.cli.connection.client import ServerError
from pyrunc.errors import InvalidArgument

PROTOCOL, OLDER = "v5.channel.k8s.io", "v4.channel.k8s.io"
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
READ_BYTES = 1 << 15
DETACH_KEYS = "ctrl-p,ctrl-q"


class Detached(Exception):
    """The user has typed the keys to leave."""


def run(url: str, *, stdin: bool, tty: bool, detach_keys: bytes = b"", timeout_s: float = 0) -> int:
    """Connect our stdio to the session behind `url` until it ends; its exit code. After
    `timeout_s`, unless 0, it is left, and the server ends its command. Raises ServerError,
    Detached."""
    socket = connect(url, PROTOCOL, OLDER)
    if stdin and not tty and socket.subprotocol == OLDER and not sys.stdin.isatty():
        click.echo(
            f"pyrunc-cri: warning: the server speaks {OLDER}, which cannot tell the end of stdin",
            err=True,
        )
    with socket, _raw_terminal(tty and sys.stdin.isatty()):
        if tty:
            _send_size(socket)
            signal.signal(signal.SIGWINCH, lambda *_: _send_size(socket))
        feeder = Feeder(socket, detach_keys if tty else b"")
        if stdin:
            threading.Thread(target=feeder.run, daemon=True).start()
        try:
            return _receive(socket, timeout_s)
        except ServerError:
            if feeder.detached:
                raise Detached from None
            raise


def connect(url: str, *protocols: str) -> Any:
    """The WebSocket at a streaming server's URL. Raises ServerError."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect as open_socket
    from websockets.typing import Subprotocol

    try:
        return open_socket(
            url.replace("http", "ws", 1),
            subprotocols=[Subprotocol(protocol) for protocol in protocols],
            max_size=None,
            compression=None,
            proxy=None,
        )
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ServerError(f"the session at {url} cannot be opened: {why}") from None
    except WebSocketException as error:
        raise ServerError(f"the session at {url} cannot be opened: {error}") from None


class Feeder:
    """Our stdin to the session, until it ends or the keys to detach are typed; `detached` says
    which."""

    def __init__(self, socket: Any, keys: bytes) -> None:
        self._socket = socket
        self._keys = keys
        self._typed = 0
        self.detached = False

    def run(self) -> None:
        """In a thread of its own."""
        with contextlib.suppress(Exception):
            while data := os.read(0, READ_BYTES):
                passed = self._without_keys(data)
                if passed:
                    self._socket.send(bytes([STDIN]) + passed)
                if self.detached:
                    # a closing handshake waits for the container
                    self._socket.socket.shutdown(SHUT_RDWR)
                    return
            if self._socket.subprotocol == PROTOCOL:
                self._socket.send(bytes([CLOSE, STDIN]))

    def _without_keys(self, data: bytes) -> bytes:
        """What is not the sequence of the keys; one that is begun waits for what comes next."""
        if not self._keys:
            return data
        passed = bytearray()
        for byte in data:
            if byte == self._keys[self._typed]:
                self._typed += 1
                if self._typed == len(self._keys):
                    self.detached = True
                    break
                continue
            passed += self._keys[: self._typed]
            self._typed = 0
            if byte == self._keys[0]:
                self._typed = 1
                self.detached = len(self._keys) == 1
            else:
                passed.append(byte)
        return bytes(passed)


def parse_keys(text: str) -> bytes:
    """`ctrl-p,ctrl-q` as bytes; empty for none. Raises InvalidArgument."""
    found = bytearray()
    for word in filter(None, text.split(",")):
        if len(word) == 1 and word.isascii():
            found += word.encode()
        elif (
            len(word) == 6
            and word.startswith("ctrl-")
            and (word[5].isalpha() or word[5] in "@[]\\^_")
        ):
            found.append(ord(word[5].upper()) & 0x1F)
        else:
            raise InvalidArgument(
                f"--detach-keys {text}: {word!r} is neither a character nor ctrl-LETTER"
            )
    return bytes(found)


def _receive(socket: Any, timeout_s: float) -> int:
    """Write what comes to our stdout and stderr; the exit code. Raises ServerError, OSError when
    ours cannot be written."""
    code = None
    for channel, content in _messages(socket, timeout_s):
        if channel in (STDOUT, STDERR):
            target = sys.stdout.buffer if channel == STDOUT else sys.stderr.buffer
            target.write(content)
            target.flush()
        elif channel == ERROR:
            code = exit_code(content)
    if code is None:
        raise ServerError("the session ended without the command's exit code")
    return code


def _messages(socket: Any, timeout_s: float) -> Iterator[tuple[int, bytes]]:
    """(channel, content) of each message that has content. Raises ServerError when the connection
    breaks, or time is up."""
    from websockets.exceptions import ConnectionClosedOK, WebSocketException

    deadline = time.monotonic() + timeout_s if timeout_s else None
    while True:
        try:
            message = socket.recv(
                None if deadline is None else max(0.0, deadline - time.monotonic())
            )
        except TimeoutError:
            socket.socket.shutdown(SHUT_RDWR)  # a closing handshake would wait for the command
            raise ServerError(f"the command took longer than {timeout_s:g} s") from None
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
