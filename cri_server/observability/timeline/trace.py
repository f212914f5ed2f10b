"""A call and the spans in it. Who makes the call sets `CURRENT`; what runs for it, in tasks of its
own as well (they inherit context variables), adds its spans there, and knows nothing of who reads
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType

SPANS_LIMIT = 512
ROOT = -1
"""The parent of spans that belong to the call itself."""


@dataclass(slots=True)
class Span:
    """A part of a call, in seconds of `time.perf_counter`, which is one clock for all processes.
    `end_s` 0: it runs still.

    `failed`: it ended with an error. `parent`: the index of the span that it is a part of.
    """

    name: str
    begin_s: float
    end_s: float = 0.0
    failed: bool = False
    parent: int = ROOT


@dataclass(slots=True)
class Trace:
    """A call that runs. `origin`: the W3C `traceparent` of who made it."""

    begin_s: float = field(default_factory=time.perf_counter)
    started_at_ns: int = field(default_factory=time.time_ns)
    spans: list[Span] = field(default_factory=list)
    origin: str = ""


ORIGIN: ContextVar[str] = ContextVar("origin", default="")
"""The `traceparent` of the call that this task answers; empty without one."""
CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)
_inside: ContextVar[int] = ContextVar("inside", default=ROOT)


class span:
    """Notes what is done inside, and that spans noted meanwhile are parts of it. `beside`: it is a
    part of the call itself, whatever it was begun in."""

    __slots__ = ("_beside", "_name", "_noted", "_token")

    def __init__(self, name: str, *, beside: bool = False) -> None:
        self._name, self._beside = name, beside
        self._noted: Span | None = None
        self._token: Token[int] | None = None

    def __enter__(self) -> None:
        trace = CURRENT.get()
        if trace is None or len(trace.spans) >= SPANS_LIMIT:
            return
        parent = ROOT if self._beside else _inside.get()
        self._noted = Span(self._name, time.perf_counter(), parent=parent)
        self._token = _inside.set(len(trace.spans))
        trace.spans.append(self._noted)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._noted is not None and self._token is not None:
            _inside.reset(self._token)
            self._noted.end_s, self._noted.failed = time.perf_counter(), kind is not None


def graft(parts: Sequence[Sequence[object]]) -> None:
    """Add what another process of ours has noted: [name, begin_s, end_s, index of its parent in
    `parts` or -1] each, parents first.

    They become parts of the span that we are in. What is of another shape is left out: that process
    may be of another version.
    """
    trace = CURRENT.get()
    if trace is None:
        return
    around, places = _inside.get(), {ROOT: _inside.get()}
    for number, part in enumerate(parts):
        if len(trace.spans) >= SPANS_LIMIT:
            return
        try:
            name, begin_s, end_s, parent = part
            found = Span(str(name), float(begin_s), float(end_s))  # type: ignore[arg-type]
            found.parent = places.get(parent, around)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            continue
        places[number] = len(trace.spans)
        trace.spans.append(found)
