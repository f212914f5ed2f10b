"""Reads a container's log files, whose lines have CRI's format `TIME STREAM TAG CONTENT`. Can start
at the last lines, select lines by time, and continue after a rotation."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from cri_server.containers import log_rotation
from pyrunc.errors import InvalidArgument, NotFound

BLOCK_BYTES = 64 << 10
RELATIVE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class LogEntry(NamedTuple):
    """A line of a log file. `content`: the output; it ends with a newline unless the line has the
    tag `P` (partial). `time`: as written in the file."""

    stream: str
    content: bytes
    time: bytes


def entries(file: BinaryIO) -> Iterator[LogEntry]:
    """Yield the complete lines from the file's position on. Skips malformed lines."""
    while True:
        position = file.tell()
        line = file.readline()
        # The shim may be in the middle of a write(2); the next call reads the line again.
        if not line.endswith(b"\n"):
            file.seek(position)
            return
        fields = line[:-1].split(b" ", 3)
        if len(fields) == 4:
            # Tags are separated by colons, and only the first one is defined (kubelet's
            # kuberuntime/logs).
            partial = fields[2].split(b":")[0] == b"P"
            yield LogEntry(
                fields[1].decode("ascii", "replace"),
                fields[3] + (b"" if partial else b"\n"),
                fields[0],
            )


class Log:
    """A container's log: its rotated files, oldest first, and the current one. Skips the compressed
    files that kubelet makes."""

    def __init__(self, path: str) -> None:
        """Open the files of the log at `path`. Raises OSError, and NotFound if there are none."""
        self._path = path
        self._files = _open_all(path)  # the first one is read, the others follow
        if not self._files:
            raise NotFound(f"no log at {path}: the container has not been started")

    def close(self) -> None:
        """Close all files."""
        _close(self._files)

    def seek_last(self, count: int) -> None:
        """Skip all but the last `count` lines of all files. Must be called before the first call of
        `new`."""
        for number, file in reversed(list(enumerate(self._files))):
            position, records = last(file, count)
            file.seek(position)
            count -= records
            if count == 0:
                _close(self._files[:number])
                del self._files[:number]
                return

    def new(self) -> Iterator[LogEntry]:
        """Yield the lines written since the last call. The first call begins at the start of the
        oldest file, or where `seek_last` has put the position. Raises OSError."""
        while True:
            if len(self._files) == 1:
                self._files += self._open_later()
            yield from entries(self._files[0])
            if len(self._files) == 1:
                return
            self._files.pop(0).close()

    def _open_later(self) -> list[BinaryIO]:
        """Open the log files that are newer than the file being read, and return them, oldest
        first. There are none until the log is rotated."""
        own = os.fstat(self._files[0].fileno())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), own):
                return []
        files = _open_all(self._path)
        statuses = [os.fstat(file.fileno()) for file in files]
        at = next((n for n, each in enumerate(statuses) if os.path.samestat(each, own)), None)
        # The current file was removed or renamed in another way: skip what is older than it.
        if at is None:
            at = sum(each.st_mtime_ns < own.st_mtime_ns for each in statuses) - 1
        _close(files[: at + 1])
        return files[at + 1 :]


def _open_all(path: str) -> list[BinaryIO]:
    """Open the log's files, oldest first; starts again if the log is rotated meanwhile. Raises
    OSError."""
    while True:
        names, files = log_rotation.rotated(path), list[BinaryIO]()
        for name in (*names, path):
            with contextlib.suppress(FileNotFoundError):
                files.append(open(name, "rb"))
        if log_rotation.rotated(path) == names:
            return files
        _close(files)


def _close(files: Iterable[BinaryIO]) -> None:
    for file in files:
        file.close()


def last(file: BinaryIO, count: int) -> tuple[int, int]:
    """Return the position of the last `count` complete lines of the file, and the number of these
    lines: `count`, or fewer if the file is shorter."""
    end = file.seek(0, os.SEEK_END)
    at = end
    missing = count + 1
    is_last = True
    while at > 0:
        start = max(0, at - BLOCK_BYTES)
        file.seek(start)
        block = file.read(at - start)
        position = len(block)
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            if is_last:
                # the bytes after the last newline are an incomplete record
                end, is_last = start + position + 1, False
            missing -= 1
            if missing == 0:
                return start + position + 1, count
        at = start
    return (0 if count else end), count + 1 - missing if count else 0


def moment(text: str, now: datetime.datetime) -> datetime.datetime:
    """Parse a time: `42m` or `1h30m` before `now`, seconds since 1970, or 2026-11-22T10:00:00Z. A
    time without a zone is local time. Raises InvalidArgument."""
    parts = RELATIVE.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return now - datetime.timedelta(seconds=sum(float(n) * UNITS_S[unit] for n, unit in parts))
    try:
        if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
            return datetime.datetime.fromtimestamp(float(text), datetime.UTC)
        time = datetime.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{text!r} is not a time such as 42m or 2026-11-22T10:00:00Z"
        ) from None
    return time if time.tzinfo else time.astimezone()


@dataclass(slots=True)
class Filter:
    """Selects log entries by time and stream. `limit_bytes`: the number of bytes that may still be
    printed, None for no limit; `cut` decreases it."""

    since: datetime.datetime | None = None
    until: datetime.datetime | None = None
    stream: str = ""
    limit_bytes: int | None = None

    def passes(self, entry: LogEntry) -> bool:
        """Return whether the filter selects the entry."""
        if self.stream and entry.stream != self.stream:
            return False
        if self.since is None and self.until is None:
            return True
        try:
            written = datetime.datetime.fromisoformat(entry.time.decode("ascii", "replace"))
        except ValueError:
            return True
        return (self.since is None or written >= self.since) and (
            self.until is None or written <= self.until
        )

    def cut(self, content: bytes) -> bytes:
        """Return the beginning of `content` that `limit_bytes` permits, and subtract its length
        from the limit."""
        if self.limit_bytes is None:
            return content
        part = content[: self.limit_bytes]
        self.limit_bytes -= len(part)
        return part
