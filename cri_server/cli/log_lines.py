"""A container's log file: its records as CRI has them (`TIME STREAM TAG CONTENT`), from the end, since a time, across rotation."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from pyrunc.errors import InvalidArgument, NotFound

BLOCK_BYTES = 64 << 10
RELATIVE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Entry(NamedTuple):
    """A record: its stream, what the container wrote (with a newline unless the line goes on), and when."""

    stream: str
    content: bytes
    time: bytes


def entries(file: BinaryIO) -> Iterator[Entry]:
    """Each complete record from the file's position on."""
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(position)
            return
        fields = line[:-1].split(b" ", 3)
        if len(fields) == 4:
            partial = fields[2].split(b":")[0] == b"P"
            yield Entry(
                fields[1].decode("ascii", "replace"), fields[3] + (b"" if partial else b"\n"), fields[0]
            )


class Log:
    """A log file, read to its present end each time; when it was rotated, on to the new one."""

    def __init__(self, path: str) -> None:
        """Raises NotFound, OSError."""
        self._path = path
        try:
            self._file: BinaryIO = open(path, "rb")
        except FileNotFoundError:
            raise NotFound(f"no log at {path}: the container was not started") from None

    def close(self) -> None:
        self._file.close()

    def seek_last(self, count: int) -> None:
        """Go to the last `count` records."""
        self._file.seek(last(self._file, count))

    def new(self) -> Iterator[Entry]:
        """What has come since. Raises OSError."""
        while True:
            rotated = self._open_next()
            yield from entries(self._file)
            if rotated is None:
                return
            self._file.close()
            self._file = rotated

    def _open_next(self) -> BinaryIO | None:
        """The file that has taken our file's place. The writer has left ours by then, but for its last lines."""
        try:
            found = open(self._path, "rb")
        except FileNotFoundError:
            return None
        if os.path.sameopenfile(found.fileno(), self._file.fileno()):
            found.close()
            return None
        return found


def last(file: BinaryIO, count: int) -> int:
    """Where the last `count` complete records begin; the file is read from its end, block by block."""
    end = file.seek(0, os.SEEK_END)
    at, missing, is_last = end, count + 1, True
    while at > 0:
        start = max(0, at - BLOCK_BYTES)
        file.seek(start)
        block = file.read(at - start)
        position = len(block)
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            if is_last:
                end, is_last = start + position + 1, False  # what follows is a record that is being written
            missing -= 1
            if missing == 0:
                return start + position + 1
        at = start
    return 0 if count else end


def moment(text: str, now: datetime.datetime) -> datetime.datetime:
    """`42m`, `1h30m`, seconds since 1970, or a time such as 2026-11-22T10:00:00Z (without a zone: here). Raises InvalidArgument."""
    parts = RELATIVE.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return now - datetime.timedelta(seconds=sum(float(n) * UNITS_S[unit] for n, unit in parts))
    try:
        if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
            return datetime.datetime.fromtimestamp(float(text), datetime.UTC)
        found = datetime.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{text!r} is not a time such as 42m or 2026-11-22T10:00:00Z") from None
    return found if found.tzinfo else found.astimezone()


@dataclass(slots=True)
class Filter:
    """Which entries are shown; `limit_bytes` counts down."""

    since: datetime.datetime | None = None
    until: datetime.datetime | None = None
    stream: str = ""
    limit_bytes: int | None = None

    def passes(self, entry: Entry) -> bool:
        """Whether this one is shown."""
        if self.stream and entry.stream != self.stream:
            return False
        if self.since is None and self.until is None:
            return True
        try:
            written = datetime.datetime.fromisoformat(_microseconds(entry.time.decode("ascii", "replace")))
        except ValueError:
            return True
        return (self.since is None or written >= self.since) and (self.until is None or written <= self.until)

    def cut(self, content: bytes) -> bytes:
        """As much of `content` as may still be shown."""
        if self.limit_bytes is None:
            return content
        shown = content[: self.limit_bytes]
        self.limit_bytes -= len(shown)
        return shown


def _microseconds(text: str) -> str:
    """RFC 3339 with nanoseconds, which Python does not read, with microseconds."""
    return re.sub(r"(\.\d{6})\d+", r"\1", text)
