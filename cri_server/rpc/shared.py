"""Keeps what all connections of a gRPC server share: the methods and limits, the read buffer, and
the counts of tasks and of bytes in large requests."""

from __future__ import annotations

import logging
import time

from cri_server.http2.limits import Http2Limits
from cri_server.rpc.methods import Table

log = logging.getLogger(__name__)

CALLS_LIMIT = 8192  # tasks of all connections
LARGE_LIMIT_BYTES = 256 << 20  # all requests that come in parts, on all connections
READ_BYTES = 16 << 10  # of one connection in one turn of the event loop
WARNING_INTERVAL_S = 10.0


class Shared:
    """The methods and limits of a server, and the counters of tasks and large requests of all its
    connections.

    `greeting_s`: the time within which a client must send the HTTP/2 preface.
    """

    def __init__(self, methods: Table, limits: Http2Limits, greeting_s: float) -> None:
        self.methods, self.limits, self.greeting_s = methods, limits, greeting_s
        # One buffer is enough: a connection has taken its bytes before the loop reads for another
        # one.
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.calls = 0  # tasks that answer a call
        self._large_bytes = 0
        # By kind: when the last warning was logged, and how many were suppressed since.
        self._warnings: dict[str, tuple[float, int]] = {}

    def admit_task(self) -> bool:
        """Count one more task, unless `CALLS_LIMIT` tasks are counted. Return whether the task was
        counted."""
        if self.calls >= CALLS_LIMIT:
            return False
        self.calls += 1
        return True

    def on_task_done(self) -> None:
        """Count one task less: a task that `admit_task` counted has ended."""
        self.calls -= 1

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes for a large request, unless this would exceed `LARGE_LIMIT_BYTES`.
        Return whether the bytes were reserved."""
        if self._large_bytes + size > LARGE_LIMIT_BYTES:
            return False
        self._large_bytes += size
        return True

    def release(self, size: int) -> None:
        """Free `size` reserved bytes. Called when a large request was answered or dropped."""
        self._large_bytes -= size

    def warn(self, kind: str, text: str) -> None:
        """Log a client's fault, at most once per `kind` in 10 s, so that a flood does not fill the
        log."""
        now_s = time.monotonic()
        last_s, suppressed = self._warnings.get(kind, (-WARNING_INTERVAL_S, 0))
        if now_s - last_s < WARNING_INTERVAL_S:
            self._warnings[kind] = last_s, suppressed + 1
            return
        earlier = f" (and {suppressed} similar ones before)" if suppressed else ""
        log.warning("%s%s", text, earlier)
        self._warnings[kind] = now_s, 0
