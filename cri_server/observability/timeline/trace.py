"""Traces of running calls. The RPC layer sets `CURRENT` to the trace of a call. The code that
serves the call adds spans to this trace, also in tasks that it starts, because tasks inherit
context variables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType

SPANS_LIMIT = 512
ROOT = -1
"""The value of `Span.parent` if no other span encloses the span."""


@dataclass(slots=True)
class Span:
    """A timed section of a call. `begin_s`, `end_s`: seconds of `time.perf_counter`, whose clock
    all processes share; `end_s` is 0 while the section runs.

    `failed`: the section ended with an error. `parent`: the index of the enclosing span in its
    trace.
    """

    name: str
    begin_s: float
    end_s: float = 0.0
    failed: bool = False
    parent: int = ROOT


@dataclass(slots=True)
class Trace:
    """The trace of a running call. `origin`: the caller's W3C `traceparent`."""

    begin_s: float = field(default_factory=time.perf_counter)
    started_at_ns: int = field(default_factory=time.time_ns)
    spans: list[Span] = field(default_factory=list)
    origin: str = ""


ORIGIN: ContextVar[str] = ContextVar("origin", default="")
"""The `traceparent` of the call that this task serves; empty without one."""
CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)
_inside: ContextVar[int] = ContextVar("inside", default=ROOT)


class span:
    """Records the time of the `with` block as a span. Spans that begin in the block become its
    children."""

    __slots__ = ("_name", "_span", "_token")

    def __init__(self, name: str) -> None:
        self._name = name
        self._span: Span | None = None
        self._token: Token[int] | None = None

    def __enter__(self) -> None:
        trace = CURRENT.get()
        if trace is None or len(trace.spans) >= SPANS_LIMIT:
            return
        self._span = Span(self._name, time.perf_counter(), parent=_inside.get())
        self._token = _inside.set(len(trace.spans))
        trace.spans.append(self._span)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is not None and self._token is not None:
            _inside.reset(self._token)
            self._span.end_s, self._span.failed = time.perf_counter(), kind is not None


def add_remote_spans(parts: Sequence[Sequence[object]]) -> None:
    """Add spans that a shim recorded, as children of the current span.

    `parts`: [name, begin_s, end_s, parent] for each span, parents first; `parent` is an index in
    `parts`, or -1 for the current span. Lists of another form are skipped, because the shim may be
    of another version.
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
            added = Span(str(name), float(begin_s), float(end_s))  # type: ignore[arg-type]
            added.parent = places.get(parent, around)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            continue
        places[number] = len(trace.spans)
        trace.spans.append(added)
