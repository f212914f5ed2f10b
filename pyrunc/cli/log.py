"""Writes a command's messages to stderr or to the log file, in the form that callers parse.

A JSON log gets exactly one line per failure, and warnings only on request: containerd reads the
last error line of the log, and podman reads the whole log as one object. If the log is a file, the
plain error is also printed on stderr. stdout is not used, because the stdout of `create` belongs to
the container. Kernel errors contain strerror's text in lower case, because podman and docker derive
their exit codes from this text.
"""

from __future__ import annotations

import os
import sys
import time

from pyrunc import jsontext
from pyrunc.errors import VISIBLE, Error, InvalidArgument, KernelError
from pyrunc.kernel.fd import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

LOWEST_NUMBER = 200
LEVELS = {"debug": 0, "info": 1, "warning": 2, "warn": 2, "error": 3}


def describe_error(error: BaseException) -> str:
    """Return an error's text for the user, one line without control characters."""
    if isinstance(error, KernelError):
        text = error.text
    elif isinstance(error, OSError) and error.errno:
        named = f"{error.filename!r}: " if error.filename is not None else ""
        text = f"{named}{os.strerror(error.errno).lower()}"
    elif isinstance(error, Error):
        text = error.message
    else:
        text = f"internal error: {type(error).__name__}: {error}"
    notes = getattr(error, "__notes__", [])
    return one_line("; ".join([text, *notes]))


def one_line(text: str) -> str:
    """Return a text without control characters, with its lines joined."""
    return text.replace("\n", "; ").translate(VISIBLE)


class CommandLog:
    """Writes a command's messages. Warnings go to the same file as errors, even if that is the
    stderr of a container.

    - `file`: the log's path, or `file:PATH`; empty for stderr
    - `format`: `text` or `json`
    - `level`: the lowest level that is written; empty for the default, which is `error` in JSON and
      `warning` in text
    """

    def __init__(
        self, file: str = "", format: str = "text", level: str = "", debug: bool = False
    ) -> None:
        if format not in ("text", "json", ""):
            raise InvalidArgument(f"invalid log-format: {format!r}")
        if level and level not in LEVELS:
            raise InvalidArgument(f"invalid log-level: {level!r}")
        if file.startswith(("journald:", "syslog:")):
            raise InvalidArgument(f"log target {file!r}: only files are supported")
        self.file, self.json = file.removeprefix("file:"), format == "json"
        # Opened once and first: a FIFO would end after one message, and a log that cannot be opened
        # has to fail the command before it does anything.
        self._descriptor = _open(self.file) if self.file else None
        self.level = 0 if debug else LEVELS[level] if level else 3 if self.json else 2

    @property
    def debugs(self) -> bool:
        """Return whether debug messages are written."""
        return self.level <= LEVELS["debug"]

    @classmethod
    def of(cls, globals: dict[str, Any]) -> CommandLog:
        """Make the log that the global options (`--log`, `--log-format`, …) describe."""
        return cls(
            globals["log"] or "", globals["log_format"], globals["log_level"], globals["debug"]
        )

    def error(self, message: str) -> None:
        """Write an error line to the log. If the log is a file, also write the plain message to
        stderr."""
        self.record(message)
        if self.file:
            _to_stderr(message)

    def record(self, message: str) -> None:
        """Write an error line to the log, without the message on stderr that `error` adds."""
        self._write("error", one_line(message))

    def warning(self, message: str) -> None:
        self._write("warning", one_line(message))

    def warnings(self, messages: Iterable[str]) -> None:
        """Write a line for each warning."""
        for message in messages:
            self.warning(message)

    def debug(self, message: str) -> None:
        self._write("debug", one_line(message))

    def _write(self, level: str, message: str) -> None:
        if LEVELS[level] < self.level:
            return
        line = _line(level, message, self.json)
        if self._descriptor is None:
            _to_stderr(line)
            return
        try:
            # One write(2) for each line, so that lines of two processes do not mix.
            os.write(self._descriptor, line.encode("utf-8", "replace") + b"\n")
        except OSError as error:
            _to_stderr(f"cannot write the log {self.file!r}: {describe_error(error)}")


def _open(path: str) -> int:
    """Open the log file for appending, and create a missing one. Raises OSError.

    The descriptor's number is at least LOWEST_NUMBER, or as high as RLIMIT_NOFILE allows. Lower
    numbers may be closed stdio, or descriptors that the caller passes to the container.
    """
    import fcntl
    from resource import RLIMIT_NOFILE, getrlimit

    # O_APPEND, because an engine may have the same file open; runc opens it with O_SYNC as well.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_SYNC | os.O_CLOEXEC
    highest = getrlimit(RLIMIT_NOFILE)[0] - 1
    with closing_fd(os.open(path, flags, 0o644)) as opened:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, min(LOWEST_NUMBER, highest))


def _line(level: str, message: str, json: bool) -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if json:
        return jsontext.dumps({"level": level, "msg": message, "time": now})
    quoted = message.replace("\\", "\\\\").replace('"', '\\"')
    return f'time="{now}" level={level} msg="{quoted}"'


def _to_stderr(line: str) -> None:
    if sys.stderr is None:  # descriptor 2 was closed
        return
    try:
        sys.stderr.write(line.encode("utf-8", "replace").decode("utf-8") + "\n")
        sys.stderr.flush()
    except OSError:
        pass
