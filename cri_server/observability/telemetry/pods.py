"""What pods use, as a kubelet with `PodAndContainerStatsFromCRI` exports it at its
/metrics/cadvisor: for nodes whose kubelet, as it is by default, asks cAdvisor, which knows no pods
of ours (docs/operate.md).
"""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.observability import metrics
from cri_server.observability.telemetry.snapshot import Family, Snapshot
from cri_server.services import Services

_TOTAL = "_total"


async def take(services: Services) -> Snapshot:
    """The families of ListMetricDescriptors with the samples of ListPodSandboxMetrics."""
    kinds = {metric.full_name: metric.kind for metric in metrics.CONTAINER}
    found = {
        described.name: _family(described, kinds.get(described.name, api.COUNTER))
        for described in metrics.descriptors()
    }
    for sandbox in services.index.select_sandboxes(state=api.SANDBOX_READY):
        measured = await metrics.of_sandbox(services, sandbox)
        for metric in (
            *measured.metrics,
            *(m for c in measured.container_metrics for m in c.metrics),
        ):
            found[metric.name].samples[tuple(metric.label_values)] = metric.value.value
    return [*found.values()]


def _family(described: api.MetricDescriptor, kind: int) -> Family:
    """Prometheus' library puts `_total` behind the name of each counter: those that have another
    name are written as gauges."""
    is_counter = kind == api.COUNTER and described.name.endswith(_TOTAL)
    name = described.name.removesuffix(_TOTAL) if is_counter else described.name
    return Family(
        name, "counter" if is_counter else "gauge", described.help, tuple(described.label_keys)
    )
