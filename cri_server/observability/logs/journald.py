"""Sends log messages to journald in its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL,
sd_journal_send(3)).

A message is a datagram of `KEY=value` lines. A value with line breaks is preceded by its length. A
message too long for a datagram is sent as a sealed memfd. The event loop does not wait for the
journal: a message that the journal's socket refuses is dropped, and the next accepted message has
the number of dropped messages (PYRUNC_LOST_BEFORE).
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterable
from struct import pack

from cri_server.observability.logs.fields import fields_of
from cri_server.observability.logs.formats import message_of
from pyrunc.kernel.fd import closing_fd

SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "pyrunc-cri"
PREFIX = "PYRUNC_"
PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # syslog(3)
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_TOO_LONG = (errno.EMSGSIZE, errno.ENOBUFS)


def encode(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Encode fields as a datagram."""
    parts = []
    for key, value in pairs:
        data = value.encode("utf-8", "replace")
        if b"\n" in data:
            parts.append(key.encode() + b"\n" + pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(key.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class Journal(logging.Handler):
    """Sends log messages to the journal at `path`. Raises OSError when journald does not listen
    there."""

    def __init__(self, path: str = SOCKET) -> None:
        super().__init__()
        self._path, self._lost = path, 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        # An exception would reach the caller of the logging function (logging.Handler.handleError).
        try:
            data = encode(self._pairs(record))
        except Exception:
            self.handleError(record)
            return
        try:
            self._send(data)
            self._lost = 0
        except OSError:
            self._lost += 1

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _pairs(self, record: logging.LogRecord) -> list[tuple[str, str]]:
        text = message_of(record)
        if record.exc_info:
            text += "\n" + (self.formatter or logging.Formatter()).formatException(record.exc_info)
        pairs = [
            ("MESSAGE", text),
            ("PRIORITY", str(PRIORITIES.get(record.levelname, 6))),
            ("SYSLOG_IDENTIFIER", IDENTIFIER),
            ("LOGGER", record.name),
            ("CODE_FILE", record.pathname),
            ("CODE_LINE", str(record.lineno)),
            ("CODE_FUNC", record.funcName),
        ]
        pairs += [(PREFIX + key.upper(), str(value)) for key, value in fields_of(record).items()]
        return [*pairs, (PREFIX + "LOST_BEFORE", str(self._lost))] if self._lost else pairs

    def _send(self, data: bytes) -> None:
        """Send a datagram. Raises OSError: BlockingIOError when the journal does not keep up."""
        try:
            self._socket.sendto(data, self._path)  # not connected: the journal may be restarted
        except OSError as error:
            if error.errno not in _TOO_LONG:
                raise
            self._send_memory(data)

    def _send_memory(self, data: bytes) -> None:
        with closing_fd(
            os.memfd_create("journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        ) as memory:
            os.write(memory, data)
            # journald maps a sealed memfd and need not copy it, because its content cannot change
            # any more.
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
            self._socket.sendmsg([b""], rights, 0, self._path)
