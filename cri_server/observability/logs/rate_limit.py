"""Limits the rate of similar log messages, so that a client that fails in a loop cannot fill the
disk.

Messages of one kind have the same logger, level and template. Suppressed messages are counted; the
next message of the kind that passes has their number in its field `suppressed`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cri_server.observability.logs.fields import add_to

BURST_S = 4.0  # a burst may have the messages of this many seconds
KINDS_LIMIT = 1024

_Kind = tuple[str, int, str]


class RateLimit(logging.Filter):
    """Limits the messages of each kind to `per_second` on average, with a burst of at most
    `per_second` times `BURST_S` (a token bucket). Critical messages always pass.

    `clock`: returns monotonic seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._per_second, self._size = per_second, max(1.0, per_second * BURST_S)
        # Tokens, the time when they were counted, suppressed messages.
        self._buckets: dict[_Kind, list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL:
            return True
        # The template has no arguments yet: a loop over a thousand images is one kind.
        kind, now_s = (record.name, record.levelno, str(record.msg)), self._clock()
        bucket = self._buckets.get(kind)
        if bucket is None:
            if len(self._buckets) >= KINDS_LIMIT:
                self._buckets.clear()
            bucket = self._buckets[kind] = [self._size, now_s, 0]
        tokens = min(self._size, bucket[0] + (now_s - bucket[1]) * self._per_second)
        bucket[1] = now_s
        if tokens < 1:
            bucket[0] = tokens
            bucket[2] += 1
            return False
        bucket[0] = tokens - 1
        if bucket[2]:
            add_to(record, suppressed=int(bucket[2]))
            bucket[2] = 0
        return True
