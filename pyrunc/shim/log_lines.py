"""Formats the output of a container as lines of the CRI log format, without I/O.

A log line is `<RFC 3339 time> <stdout|stderr> <F|P> <content>\\n`. An output line of at most 16 KiB
becomes one `F` line. A longer one is cut into `P` lines of 16 KiB and a last `F` line. Up to 16 KiB
without a newline wait in memory for the rest of the output line. At the end of the stream they
become a `P` line. Readers join the lines P … P F. Content is never changed. All lines of one `feed`
have the same time. Format: kubernetes design "CRI: container runtime logs"; the limit of 16 KiB and
the `P` line at the end of the stream are as in containerd.
"""

from __future__ import annotations

import time

PARTIAL_BYTES = 16 * 1024


class LogLines:
    """Converts the output of one stream of a container to log lines."""

    __slots__ = ("_stream", "_tail")

    def __init__(self, stream: str) -> None:
        self._stream = stream.encode()
        self._tail = bytearray()

    def feed(self, data: bytes, stamp: bytes) -> bytes:
        """Return the log lines that `data` completes; may be empty. `stamp`: the time, as
        `time_stamp` returns it."""
        if self._tail:
            if len(self._tail) + len(data) <= PARTIAL_BYTES and b"\n" not in data:
                # the waiting bytes are not searched again: more may come one byte at a time
                self._tail += data
                return b""
            data = bytes(self._tail) + data
        full = b"%b %b F " % (stamp, self._stream)
        records: list[bytes] = []
        begin = at = 0  # [begin, at) are whole lines, none too long, that are not in `records` yet
        while len(data) - at > PARTIAL_BYTES:
            # One byte more, for a line of exactly 16 KiB with its newline.
            newline = data.rfind(b"\n", at, at + PARTIAL_BYTES + 1)
            if newline >= 0:
                at = newline + 1
                continue
            records += _whole_lines(full, data[begin:at])
            records.append(b"%b %b P %b\n" % (stamp, self._stream, data[at : at + PARTIAL_BYTES]))
            begin = at = at + PARTIAL_BYTES
        end = max(data.rfind(b"\n", at) + 1, at)
        records += _whole_lines(full, data[begin:end])
        self._tail = bytearray(data[end:])
        return records[0] if len(records) == 1 else b"".join(records)

    def finish(self, stamp: bytes) -> bytes:
        """Return a log line for the waiting output, which has no newline; empty if there is
        none."""
        tail, self._tail = bytes(self._tail), bytearray()
        return b"%b %b P %b\n" % (stamp, self._stream, tail) if tail else b""


def time_stamp() -> bytes:
    """Return the present time, such as `2026-01-31T12:00:00.000000001Z`."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode() + b".%09dZ" % nanoseconds
    )


def _whole_lines(prefix: bytes, lines: bytes) -> list[bytes]:
    """Return a list with one item: `lines` with `prefix` before each line. `lines` ends with a
    newline. Returns [] if `lines` is empty."""
    return [prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"] if lines else []
