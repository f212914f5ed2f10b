"""The same spans for OpenTelemetry: to a collector by OTLP over HTTP, when `[tracing] endpoint`
names one.

The library is imported then only. A call costs a place in a bounded queue: a thread makes spans of
it, the library's own thread sends them. When a collector hangs or is gone, spans are lost and
nothing else. Who calls with a W3C `traceparent`, as kubelet does, is the parent, and has decided
whether the call is sampled; `sampling` is for the others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyrunc
from cri_server.observability.timeline.trace import ROOT, Trace
from pyrunc.errors import Unsupported

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

CALLS_LIMIT = 1000  # that wait to become spans
SPANS_LIMIT = 4096  # that wait to be sent
BATCH_SPANS = 512
INTERVAL_MS = 1000.0
SEND_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
PATH = "/v1/traces"
ATTRIBUTES = {
    "container": "k8s.container.name",
    "container_id": "container.id",
    "image": "container.image.name",
    "pod_id": "pyrunc.pod_id",
    "step": "pyrunc.failed_step",
    "explain": "error.type",
}
"""Fields of a call by the names of OpenTelemetry's semantic conventions."""

Queued = tuple[str, Mapping[str, object], Trace]


class Exporter:
    """Sends spans until `close`."""

    def __init__(self, endpoint: str, sampling: float) -> None:
        """`endpoint`: http[s]://HOST:PORT, with a path where it is not /v1/traces. Raises
        Unsupported without the library."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            raise Unsupported(
                f"tracing.endpoint: {error.name or 'opentelemetry'} is not installed: pip install 'pyrunc[tracing]'"
            ) from None
        # a batch that failed, not each attempt
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling)),
            resource=Resource.create(
                {"service.name": "pyrunc-cri", "service.version": pyrunc.__version__}
            ),
            shutdown_on_exit=False,  # it would wait for a collector that hangs
        )
        sender = OTLPSpanExporter(endpoint=_url(endpoint), timeout=SEND_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                sender,
                max_queue_size=SPANS_LIMIT,
                schedule_delay_millis=INTERVAL_MS,
                max_export_batch_size=BATCH_SPANS,
            )
        )
        self._queue: queue.Queue[Queued | None] = queue.Queue(CALLS_LIMIT)
        self._closed = threading.Event()
        tracer = self._provider.get_tracer("pyrunc-cri", pyrunc.__version__)
        threading.Thread(target=self._convert, args=(tracer,), name="tracing", daemon=True).start()

    def add(self, call: str, said: Mapping[str, object], trace: Trace) -> None:
        """Send a call that has ended, with its spans; never waits."""
        try:
            self._queue.put_nowait((call, said, trace))
        except queue.Full:
            log.debug("tracing: %s is not sent: too many calls wait", call)

    async def close(self) -> None:
        """Send what waits, for `CLOSE_TIMEOUT_S` at most."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        await asyncio.to_thread(self._closed.wait, CLOSE_TIMEOUT_S)

    def _convert(self, tracer: Tracer) -> None:
        """The thread: spans of calls."""
        while (found := self._queue.get()) is not None:
            try:
                _send(tracer, *found)
            except Exception as error:  # of one call
                log.warning("tracing: %s: %s", found[0], error)
        self._provider.shutdown()
        self._closed.set()


def _url(endpoint: str) -> str:
    """OTLP's own path where none is given (opentelemetry.io/docs/specs/otlp, "OTLP/HTTP Request")."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH


def _send(tracer: Tracer, call: str, said: Mapping[str, object], trace: Trace) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    def at_ns(second: float) -> int:
        return trace.started_at_ns + round((second - trace.begin_s) * 1e9)

    caller = TraceContextTextMapPropagator().extract({"traceparent": trace.origin})
    root = tracer.start_span(
        call,
        caller,
        SpanKind.SERVER,
        attributes=_attributes(call, said),
        start_time=trace.started_at_ns,
    )
    if not root.is_recording():
        return
    made: dict[int, OtelSpan] = {ROOT: root}
    for number, part in enumerate(list(trace.spans)):
        if not part.end_s:  # it goes on, though nobody waits any more
            continue
        parent = set_span_in_context(made.get(part.parent, root))
        span = made[number] = tracer.start_span(part.name, parent, start_time=at_ns(part.begin_s))
        if part.failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=at_ns(part.end_s))
    if said.get("outcome") != "OK":
        root.set_status(Status(StatusCode.ERROR, str(said.get("error", ""))))
    took_ms = said.get("duration_ms")
    assert isinstance(took_ms, float)
    root.end(end_time=trace.started_at_ns + round(took_ms * 1e6))


def _attributes(call: str, said: Mapping[str, object]) -> dict[str, Any]:
    found = {name: str(said[field]) for field, name in ATTRIBUTES.items() if said.get(field)}
    namespace, slash, name = str(said.get("pod", "")).partition("/")
    if slash:
        found |= {"k8s.namespace.name": namespace, "k8s.pod.name": name}
    return {
        **found,
        "rpc.system": "grpc",
        "rpc.method": call,
        "rpc.response.status_code": str(said["outcome"]),
    }
