"""Writes a snapshot in the formats of Prometheus, with Prometheus' client library.

Importing the library costs 33 ms and 2.6 MiB, so only the first scrape imports it, in the thread
that writes the reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cri_server.observability.meters import BOUNDS_S
from cri_server.observability.telemetry.snapshot import Family, Histogram, Snapshot


class _Fixed(Collector):
    """A collector that yields the metrics of one snapshot to Prometheus' client library."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        return [_histogram(f) if isinstance(f, Histogram) else _family(f) for f in self._snapshot]

    def describe(self) -> Iterable[Metric]:
        return []


def write(snapshot: Snapshot, accept: str, *, of_process: bool = True) -> tuple[bytes, str]:
    """Write the snapshot in the format that the client's Accept header (`accept`) prefers; return
    body and content type. `of_process`: add the metrics of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(snapshot))
    if of_process:
        ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(source: Family) -> Metric:
    kind = GaugeMetricFamily if source.kind == "gauge" else CounterMetricFamily
    family = kind(source.name, source.text, labels=source.labels)
    for labels, value in source.samples.items():
        family.add_metric(labels, value)
    return family


def _histogram(source: Histogram) -> Metric:
    family = HistogramMetricFamily(source.name, source.text, labels=source.labels)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for labels, (counts, sum_s) in source.samples.items():
        # Prometheus' buckets are cumulative.
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(labels, buckets, sum_s)
    return family
