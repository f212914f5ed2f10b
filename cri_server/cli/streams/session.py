"""Connects this process's stdio to a process in a container, through a WebSocket session of the
streaming server."""

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

from cri_server.cli.connection.client import ServerError
from cri_server.cli.output.report import report
from pyrunc.errors import InvalidArgument

PROTOCOL, OLDER = "v5.channel.k8s.io", "v4.channel.k8s.io"
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
READ_BYTES = 1 << 15
DETACH_KEYS = "ctrl-p,ctrl-q"


class Detached(Exception):
    """The user has typed the detach keys."""


def run(url: str, *, stdin: bool, tty: bool, detach_keys: bytes = b"", timeout_s: float = 0) -> int:
    """Connect stdio to the session at `url` until it ends, and return the exit code of the command.
    `timeout_s`: after this time the session is closed, and the server ends the command; 0 for no
    limit. Raises ServerError, Detached."""
    socket = connect(url, PROTOCOL, OLDER)
    if stdin and not tty and socket.subprotocol == OLDER and not sys.stdin.isatty():
        report(f"warning: the server uses {OLDER}, which cannot signal the end of stdin")
    with socket, _raw_terminal(tty and sys.stdin.isatty()):
        if tty:
            _send_size(socket)
            signal.signal(signal.SIGWINCH, lambda *_: _send_size(socket))
        feeder = Feeder(socket, detach_keys if tty else b"")
        # The thread is a daemon, because read(2) from a terminal cannot be interrupted, and the end
        # of the command must not wait for a key.
        if stdin:
            threading.Thread(target=feeder.run, daemon=True).start()
        try:
            return _receive(socket, timeout_s)
        except ServerError:
            if feeder.detached:
                raise Detached from None
            raise


def connect(url: str, *protocols: str) -> Any:
    """Open the WebSocket at a streaming server's URL. `protocols`: the subprotocols to offer, best
    first. Raises ServerError."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect as open_socket
    from websockets.typing import Subprotocol

    try:
        return open_socket(
            url.replace("http", "ws", 1),
            subprotocols=[Subprotocol(protocol) for protocol in protocols],
            max_size=None,
            compression=None,  # the server is on this machine or in its network
            # By default the library takes the proxy of the environment (websockets 15), for
            # loopback as well unless no_proxy names it.
            proxy=None,
        )
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ServerError(f"cannot open the session at {url}: {why}") from None
    except WebSocketException as error:
        raise ServerError(f"cannot open the session at {url}: {error}") from None


class Feeder:
    """Copies stdin to the session until stdin ends or the user types the detach keys. `detached` is
    True after the detach keys."""

    def __init__(self, socket: Any, keys: bytes) -> None:
        self._socket = socket
        self._keys = keys
        self._typed = 0
        self.detached = False

    def run(self) -> None:
        """Copy stdin to the session. Runs in its own thread."""
        with contextlib.suppress(Exception):
            while data := os.read(0, READ_BYTES):
                passed = self._without_keys(data)
                if passed:
                    self._socket.send(bytes([STDIN]) + passed)
                if self.detached:
                    # a closing handshake would wait for the container
                    self._socket.socket.shutdown(SHUT_RDWR)
                    return
            # Only v5 can say that stdin has ended; with v4 the command waits for more.
            if self._socket.subprotocol == PROTOCOL:
                self._socket.send(bytes([CLOSE, STDIN]))

    def _without_keys(self, data: bytes) -> bytes:
        """Return the input without the detach sequence. If the input ends with a part of the
        sequence, this part is held back until the next byte."""
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
    """Parse `ctrl-p,ctrl-q` to bytes; no bytes for an empty text. Raises InvalidArgument."""
    keys = bytearray()
    for key in filter(None, text.split(",")):
        if len(key) == 1 and key.isascii():
            keys += key.encode()
        elif (
            len(key) == 6 and key.startswith("ctrl-") and (key[5].isalpha() or key[5] in "@[]\\^_")
        ):
            keys.append(ord(key[5].upper()) & 0x1F)
        else:
            raise InvalidArgument(
                f"--detach-keys {text}: {key!r} is neither a character nor ctrl-LETTER"
            )
    return bytes(keys)


def _receive(socket: Any, timeout_s: float) -> int:
    """Write the session's output to stdout and stderr, and return the exit code. Raises
    ServerError, and OSError if a stream cannot be written."""
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
    """Yield the channel and content of each message that has content. Raises ServerError when the
    connection breaks or `timeout_s` has passed; 0 means no timeout."""
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
            raise ServerError(f"the connection of the session broke: {error}") from None
        data = message if isinstance(message, bytes) else message.encode()
        if len(data) > 1:
            yield data[0], data[1:]


def exit_code(status: bytes) -> int:
    """Return the command's exit code from a metav1.Status. Raises ServerError if the status is
    malformed or reports a failure other than an exit code."""
    try:
        document = json.loads(status)
        if document.get("status") == "Success":
            return 0
        for cause in (document.get("details") or {}).get("causes") or []:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise ServerError(str(document.get("message", "the session failed")))
    except (ValueError, AttributeError, KeyError):
        raise ServerError(f"the session ended with a malformed status: {status[:200]!r}") from None


def _send_size(socket: Any) -> None:
    try:
        rows, columns = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8))[:2]
    except OSError:
        return
    if rows and columns:
        with contextlib.suppress(Exception):
            # The keys are those of Go's TerminalSize, which has no JSON tags.
            socket.send(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": rows}).encode())


@contextlib.contextmanager
def _raw_terminal(enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    before = termios.tcgetattr(0)
    try:
        # The container's terminal interprets and echoes the keys, ^C as well.
        terminal.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
