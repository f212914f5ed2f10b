"""Exports spans to the OpenTelemetry collector at `[tracing] endpoint`, with OTLP over HTTP.
Without this key the OpenTelemetry library is not imported.

A call is put into a bounded queue; one thread converts it to spans, and the library's own thread
sends them. When the collector hangs or is unreachable, only spans are lost. Callers, such as
kubelet, may send a W3C `traceparent`: it names the parent of the call's span, and its flag
`sampled` decides whether the call is exported. `sampling` applies to calls without `traceparent`.
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

CALLS_LIMIT = 1000  # queued for conversion
SPANS_LIMIT = 4096  # queued for sending
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
"""Fields of a call and their names in OpenTelemetry's semantic conventions."""

Queued = tuple[str, Mapping[str, object], Trace]


class Exporter:
    """Exports the spans of calls until `close`."""

    def __init__(self, endpoint: str, sampling: float) -> None:
        """`endpoint`: http[s]://HOST:PORT[/PATH], by default with the path /v1/traces; `sampling`:
        the share of calls to export, 0 to 1. Raises Unsupported without the OpenTelemetry
        library."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            raise Unsupported(
                f"tracing.endpoint: {error.name or 'opentelemetry'} is not installed: "
                "pip install 'pyrunc[tracing]'"
            ) from None
        # Log failed batches, not each attempt.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling)),
            resource=Resource.create(
                {"service.name": "pyrunc-cri", "service.version": pyrunc.__version__}
            ),
            shutdown_on_exit=False,  # a hanging collector would delay the exit
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
        # A daemon thread: at its end the interpreter waits for all other threads.
        threading.Thread(target=self._convert, args=(tracer,), name="tracing", daemon=True).start()

    def add(self, call: str, record: Mapping[str, object], trace: Trace) -> None:
        """Queue a call that has ended, with its spans; does not wait. Drops the call when the queue
        is full."""
        try:
            self._queue.put_nowait((call, record, trace))
        except queue.Full:
            log.debug("tracing: %s is dropped: the queue is full", call)

    async def close(self) -> None:
        """Send queued spans, for at most `CLOSE_TIMEOUT_S`."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        await asyncio.to_thread(self._closed.wait, CLOSE_TIMEOUT_S)

    def _convert(self, tracer: Tracer) -> None:
        """Convert queued calls to spans until None is queued, then send the rest. Runs in a
        thread."""
        while (queued := self._queue.get()) is not None:
            try:
                _send(tracer, *queued)
            except Exception as error:  # must not end the thread
                log.warning("tracing: cannot send %s: %s", queued[0], error)
        self._provider.shutdown()
        self._closed.set()


def _url(endpoint: str) -> str:
    """Add OTLP's default path if there is none (opentelemetry.io/docs/specs/otlp, "OTLP/HTTP
    Request")."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH


def _send(tracer: Tracer, call: str, record: Mapping[str, object], trace: Trace) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    def at_ns(second: float) -> int:
        return trace.started_at_ns + round((second - trace.begin_s) * 1e9)

    caller = TraceContextTextMapPropagator().extract({"traceparent": trace.origin})
    root = tracer.start_span(
        call,
        caller,
        SpanKind.SERVER,
        attributes=_attributes(call, record),
        start_time=trace.started_at_ns,
    )
    if not root.is_recording():
        return
    spans: dict[int, OtelSpan] = {ROOT: root}
    for number, part in enumerate(list(trace.spans)):
        if not part.end_s:  # still running after its caller has hung up
            continue
        parent = set_span_in_context(spans.get(part.parent, root))
        span = spans[number] = tracer.start_span(part.name, parent, start_time=at_ns(part.begin_s))
        if part.failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=at_ns(part.end_s))
    if record.get("outcome") != "OK":
        root.set_status(Status(StatusCode.ERROR, str(record.get("error", ""))))
    took_ms = record.get("duration_ms")
    assert isinstance(took_ms, float)
    root.end(end_time=trace.started_at_ns + round(took_ms * 1e6))


def _attributes(call: str, record: Mapping[str, object]) -> dict[str, Any]:
    attributes = {
        name: str(record[field]) for field, name in ATTRIBUTES.items() if record.get(field)
    }
    namespace, slash, name = str(record.get("pod", "")).partition("/")
    if slash:
        attributes |= {"k8s.namespace.name": namespace, "k8s.pod.name": name}
    return {
        **attributes,
        "rpc.system": "grpc",
        "rpc.method": call,
        "rpc.response.status_code": str(record["outcome"]),
    }
