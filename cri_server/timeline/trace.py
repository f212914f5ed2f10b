"""A call and the spans in it. Who makes the call sets `CURRENT`; what runs for it, in tasks of its own as well (they inherit
context variables), adds its spans there, and knows nothing of who reads them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

SPANS_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a call, in seconds of `time.perf_counter`. `failed`: it ended with an error."""

    name: str
    begin_s: float
    end_s: float
    failed: bool = False


@dataclass(slots=True)
class Trace:
    """A call that runs."""

    begin_s: float = field(default_factory=time.perf_counter)
    started_at_ns: int = field(default_factory=time.time_ns)
    spans: list[Span] = field(default_factory=list)


CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def add(name: str, begin_s: float, end_s: float, *, failed: bool = False) -> None:
    """Note a part of the call that this task works for, if it works for one."""
    trace = CURRENT.get()
    if trace is not None and len(trace.spans) < SPANS_LIMIT:
        trace.spans.append(Span(name, begin_s, end_s, failed))


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Note what is done inside."""
    begin_s, failed = time.perf_counter(), True
    try:
        yield
        failed = False
    finally:
        add(name, begin_s, time.perf_counter(), failed=failed)
