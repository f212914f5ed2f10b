"""Metrics of pods, as a kubelet with `PodAndContainerStatsFromCRI` exports them at
/metrics/cadvisor.

By default kubelet uses cAdvisor instead, which does not recognise this runtime's pods
(docs/operate.md).
"""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.observability import metrics
from cri_server.observability.telemetry.snapshot import Family, Snapshot
from cri_server.services import Services

_TOTAL = "_total"


async def take(services: Services) -> Snapshot:
    """Measure all ready pods. Returns a Prometheus family for each metric of ListMetricDescriptors,
    with the values that ListPodSandboxMetrics returns."""
    kinds = {metric.name: metric.kind for metric in metrics.CONTAINER}
    families = {
        descriptor.name: _family(descriptor, kinds.get(descriptor.name, api.COUNTER))
        for descriptor in metrics.descriptors()
    }
    sandboxes = services.index.select_sandboxes(state=api.SANDBOX_READY)
    async for measured in metrics.of_sandboxes(services, sandboxes):
        for metric in (
            *measured.metrics,
            *(m for c in measured.container_metrics for m in c.metrics),
        ):
            families[metric.name].samples[tuple(metric.label_values)] = metric.value.value
    return [*families.values()]


def _family(descriptor: api.MetricDescriptor, kind: int) -> Family:
    """Convert a metric's descriptor to a Prometheus family without samples. A counter whose name
    does not end in `_total` becomes a gauge, because Prometheus' client library appends `_total` to
    the names of counters."""
    is_counter = kind == api.COUNTER and descriptor.name.endswith(_TOTAL)
    name = descriptor.name.removesuffix(_TOTAL) if is_counter else descriptor.name
    return Family(
        name, "counter" if is_counter else "gauge", descriptor.help, tuple(descriptor.label_keys)
    )
