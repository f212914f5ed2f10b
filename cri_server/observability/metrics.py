"""Metrics of pods and containers for a kubelet without cAdvisor: the table of metrics, and their
values.

kubelet reads names and label keys once, at its start, so the table is the same for every container.
A value that this kernel does not count is 0. Pressure and huge pages are omitted instead, because 0
would make the node look idle. The size of a writable layer is omitted until it is measured. Values
are integers; seconds are rounded down.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.observability import stats
from cri_server.services import Services
from cri_server.spec import groups
from cri_server.store.model import Container, Sandbox
from pyrunc.cgroups.stats import Memory, Stats
from pyrunc.kernel.process import interface_counters

BASE_LABELS = ("pod", "namespace", "container", "id", "image")


@dataclass(slots=True)
class ContainerFigures:
    """The measurements of one container."""

    usage: Stats
    memory: Memory
    processes: int
    threads: int
    descriptors: int
    sockets: int
    layer_bytes: int | None
    disk: os.statvfs_result
    started_at_ns: int
    limits: api.LinuxContainerResources
    open_files_limit: int | None

    def stat(self, name: str) -> int:
        """Return the field `name` of memory.stat; 0 if the kernel lacks it."""
        return self.memory.stat.get(name, 0)


Values = list[tuple[tuple[str, ...], int]]
Reader = Callable[[ContainerFigures], int | Values]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `read` returns one value, or one for each combination of the values of `labels`."""

    name: str
    help: str
    kind: int
    read: Reader
    labels: tuple[str, ...] = ()


def _counter(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"container_{name}", help, api.COUNTER, read, labels)


def _gauge(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"container_{name}", help, api.GAUGE, read, labels)


def _cpu(key: str) -> Reader:
    """Return a function that reads the field `key` of cpu.stat."""
    return lambda figures: (figures.usage.cpu or {}).get(key, 0)


def _cpu_seconds(key: str) -> Reader:
    """Return a function that reads the time `key` of cpu.stat and converts it from microseconds to
    seconds."""
    return lambda figures: (figures.usage.cpu or {}).get(key, 0) // 1_000_000


def _memory_stat(key: str) -> Reader:
    """Return a function that reads the field `key` of memory.stat."""
    return lambda figures: figures.stat(key)


def _memory_events(key: str) -> Reader:
    """Return a function that reads the field `key` of memory.events. Its result is 0 if the field
    is missing."""
    return lambda figures: figures.memory.events.get(key, 0)


def _limit(name: str) -> Reader:
    """Return a function that reads the field `name` of a container's LinuxContainerResources. Its
    result is 0 if no limit is set."""
    return lambda figures: max(0, getattr(figures.limits, name))


def _failures(figures: ContainerFigures) -> Values:
    return [
        (("pgfault", "container"), figures.stat("pgfault")),
        (("pgmajfault", "container"), figures.stat("pgmajfault")),
    ]


def _io(key: str) -> Reader:
    def read(figures: ContainerFigures) -> Values:
        return [((device,), numbers.get(key, 0)) for device, numbers in figures.usage.io.items()]

    return read


def _device_usage(figures: ContainerFigures) -> Values:
    return [
        ((device, *device.split(":", 1), operation), numbers.get(key, 0))
        for device, numbers in figures.usage.io.items()
        for operation, key in (("Read", "rbytes"), ("Write", "wbytes"))
    ]


def _huge_pages(key: str) -> Reader:
    def read(figures: ContainerFigures) -> Values:
        return [((size,), numbers.get(key) or 0) for size, numbers in figures.usage.hugetlb.items()]

    return read


def _pressure(name: str, kind: str) -> Reader:
    """Return a function that reads for how many seconds tasks have waited for the resource `name`
    (PSI). `kind`: `some` (at least one task waited) or `full` (all tasks waited)."""

    def read(figures: ContainerFigures) -> Values:
        pressure = figures.usage.pressure.get(name, {}).get(kind)
        return [] if pressure is None else [((), int(pressure["total"]) // 1_000_000)]

    return read


def _soft_limits(figures: ContainerFigures) -> Values:
    """Return the soft limit of open files as `max_open_files`, the only ulimit that cAdvisor
    exports; empty if the process has ended."""
    limit = figures.open_files_limit
    return [] if limit is None else [(("max_open_files",), limit)]


def _working_set(figures: ContainerFigures) -> int:
    return max(0, figures.memory.current - figures.stat("inactive_file"))


CONTAINER = (
    _counter("cpu_usage_seconds_total", "CPU time consumed", _cpu_seconds("usage_usec")),
    _counter("cpu_user_seconds_total", "CPU time consumed in user mode", _cpu_seconds("user_usec")),
    _counter(
        "cpu_system_seconds_total", "CPU time consumed in the kernel", _cpu_seconds("system_usec")
    ),
    _counter("cpu_cfs_periods_total", "Enforcement periods that have passed", _cpu("nr_periods")),
    _counter("cpu_cfs_throttled_periods_total", "Throttled periods", _cpu("nr_throttled")),
    _counter("cpu_cfs_throttled_seconds_total", "Time throttled", _cpu_seconds("throttled_usec")),
    _gauge("memory_cache", "Page cache in bytes", _memory_stat("file")),
    _gauge("memory_rss", "Anonymous memory in bytes", _memory_stat("anon")),
    _gauge("memory_swap", "Swap in use in bytes", lambda f: f.memory.swap_current or 0),
    _gauge("memory_mapped_file", "Mapped files in bytes", _memory_stat("file_mapped")),
    _gauge("memory_kernel_usage", "Kernel memory in bytes", _memory_stat("kernel")),
    _counter("memory_failcnt", "Times that the limit was hit", _memory_events("max")),
    _gauge("memory_usage_bytes", "Memory in use", lambda f: f.memory.current),
    # memory.peak exists since Linux 5.19.
    _gauge(
        "memory_max_usage_bytes", "The most memory that was in use", lambda f: f.memory.peak or 0
    ),
    _gauge(
        "memory_working_set_bytes", "Memory in use that cannot be dropped at once", _working_set
    ),
    _counter("memory_failures_total", "Page faults", _failures, "failure_type", "scope"),
    _counter("oom_events_total", "Processes that the OOM killer took", _memory_events("oom_kill")),
    _gauge("fs_inodes_free", "Free inodes of the writable layer's disk", lambda f: f.disk.f_ffree),
    _gauge("fs_inodes_total", "Inodes of the writable layer's disk", lambda f: f.disk.f_files),
    _gauge(
        "fs_limit_bytes",
        "Size of the writable layer's disk",
        lambda f: f.disk.f_blocks * f.disk.f_frsize,
    ),
    _gauge(
        "fs_usage_bytes",
        "Bytes that the writable layer takes",
        lambda f: [] if f.layer_bytes is None else f.layer_bytes,
    ),
    _counter("fs_reads_total", "Reads completed", _io("rios"), "device"),
    _counter("fs_reads_bytes_total", "Bytes read", _io("rbytes"), "device"),
    _counter("fs_writes_total", "Writes completed", _io("wios"), "device"),
    _counter("fs_writes_bytes_total", "Bytes written", _io("wbytes"), "device"),
    _counter(
        "blkio_device_usage_total",
        "Bytes read and written",
        _device_usage,
        "device",
        "major",
        "minor",
        "operation",
    ),
    _gauge("processes", "Processes", lambda f: f.processes),
    _gauge("threads", "Threads", lambda f: f.threads),
    _gauge(
        "threads_max",
        "The most threads that are permitted, 0 for no limit",
        lambda f: (f.usage.pids or {}).get("max") or 0,
    ),
    _gauge("sockets", "Open sockets", lambda f: f.sockets),
    _gauge("file_descriptors", "Open descriptors", lambda f: f.descriptors),
    _gauge("last_seen", "When this was measured", lambda f: int(time.time())),
    _gauge(
        "start_time_seconds",
        "When the container was started",
        lambda f: f.started_at_ns // 1_000_000_000,
    ),
    _gauge("spec_cpu_period", "CPU period in microseconds", lambda f: f.limits.cpu_period),
    _gauge("spec_cpu_shares", "CPU shares", lambda f: f.limits.cpu_shares),
    _gauge("spec_memory_limit_bytes", "Memory limit", _limit("memory_limit_in_bytes")),
    _gauge(
        "spec_memory_swap_limit_bytes",
        "Memory and swap limit",
        _limit("memory_swap_limit_in_bytes"),
    ),
    _gauge("spec_cpu_quota", "CPU time in a period, 0 for no limit", _limit("cpu_quota")),
    _gauge(
        "spec_memory_reservation_limit_bytes",
        "Memory that is never reclaimed",
        lambda f: f.memory.min or 0,
    ),
    _gauge("ulimits_soft", "Soft limits of the container's first process", _soft_limits, "ulimit"),
    _gauge(
        "hugetlb_usage_bytes", "Huge pages in use, in bytes", _huge_pages("current"), "pagesize"
    ),
    _gauge(
        "hugetlb_max_usage_bytes",
        "The most huge pages, which cgroup v2 does not count",
        _huge_pages("peak"),
        "pagesize",
    ),
    *(
        _counter(
            f"pressure_{kind_of}_{word}_seconds_total",
            f"Time in which {what} for {name}",
            _pressure(kind_of, kind),
        )
        for kind_of, name in (("cpu", "CPU time"), ("memory", "memory"), ("io", "disks"))
        for word, kind, what in (
            ("waiting", "some", "a task waited"),
            ("stalled", "full", "all tasks waited"),
        )
    ),
)

# Columns of /proc/PID/net/dev; these are measured per pod and interface.
NETWORK = tuple(
    (
        f"network_{direction}_{what}_total",
        f"{what.replace('_', ' ').capitalize()} {word}",
        column + offset,
    )
    for direction, word, column in (("receive", "received", 0), ("transmit", "sent", 8))
    for what, offset in (("bytes", 0), ("packets", 1), ("errors", 2), ("packets_dropped", 3))
)


def descriptors() -> list[api.MetricDescriptor]:
    """Return the descriptors of all metrics, which kubelet reads once at its start."""
    columns = [(m.name, m.help, m.labels) for m in CONTAINER]
    columns += [(f"container_{name}", help, ("interface",)) for name, help, _ in NETWORK]
    return [
        api.MetricDescriptor(name=name, help=help, label_keys=[*BASE_LABELS, *labels])
        for name, help, labels in columns
    ]


async def of_sandboxes(
    services: Services, sandboxes: Iterable[Sandbox]
) -> AsyncIterator[api.PodSandboxMetrics]:
    """Yield the metrics of each pod (its network) and of its running containers."""
    pods = list(sandboxes)
    containers = (c for pod in pods for c in services.index.containers_of(pod) if c.running)
    sizes = await stats.layers.of(stats.layer_roots(services, containers))
    for pod in pods:
        yield await _of_sandbox(services, pod, sizes)


async def _of_sandbox(
    services: Services, sandbox: Sandbox, sizes: Mapping[str, stats.LayerSize]
) -> api.PodSandboxMetrics:
    metadata = sandbox.config.metadata
    base = [metadata.name, metadata.namespace, "", sandbox.id, ""]
    result = api.PodSandboxMetrics(pod_sandbox_id=sandbox.id)
    if sandbox.pause is not None and not sandbox.host_network:
        result.metrics.extend(_network(base, sandbox.pause.pid))
    for container in services.index.containers_of(sandbox):
        if container.running:
            container_metrics = result.container_metrics.add(container_id=container.id)
            size = sizes.get(container.id)
            container_metrics.metrics.extend(
                await _of_container(services, sandbox, container, size)
            )
    return result


async def _of_container(
    services: Services, sandbox: Sandbox, container: Container, size: stats.LayerSize | None
) -> list[api.Metric]:
    figures = await asyncio.to_thread(_measure, services, container, size)
    pod, name = sandbox.config.metadata, container.config.metadata.name
    base = [pod.name, pod.namespace, name, container.id, container.image_name]
    return [
        api.Metric(
            name=metric.name,
            metric_type=metric.kind,  # type: ignore[arg-type]
            label_values=[*base, *labels],
            value=api.UInt64Value(value=value),
        )
        for metric in CONTAINER
        for labels, value in _values(metric, figures)
    ]


def _values(metric: Metric, figures: ContainerFigures) -> Values:
    value = metric.read(figures)
    return value if isinstance(value, list) else [((), value)]


def _measure(
    services: Services, container: Container, size: stats.LayerSize | None
) -> ContainerFigures:
    group = groups.place(container.cgroups_path, container.id)
    usage, pids = group.stats(), group.processes()
    threads = descriptors_open = sockets = 0
    for pid in pids:
        threads += len(_names(f"/proc/{pid}/task"))
        for link in _links(f"/proc/{pid}/fd"):
            descriptors_open += 1
            sockets += link.startswith("socket:")
    return ContainerFigures(
        usage=usage,
        memory=usage.memory or stats.memory_of(pids),
        processes=len(pids),
        threads=threads,
        descriptors=descriptors_open,
        sockets=sockets,
        layer_bytes=size.used_bytes if size else None,
        disk=os.statvfs(services.paths.root),
        started_at_ns=container.started_at_ns,
        limits=container.resources,
        open_files_limit=_open_files_limit(container),
    )


def _open_files_limit(container: Container) -> int | None:
    """Return the soft RLIMIT_NOFILE of the container's first process (prlimit(2)); None after its
    exit."""
    if container.process is None:
        return None
    try:
        return resource.prlimit(container.process.pid, resource.RLIMIT_NOFILE)[0]
    except (OSError, ValueError):
        return None


def _network(base: list[str], pid: int) -> Iterator[api.Metric]:
    for interface, columns in interface_counters(pid).items():
        for name, _, column in NETWORK:
            yield api.Metric(
                name=f"container_{name}",
                metric_type=api.COUNTER,
                label_values=[*base, interface],
                value=api.UInt64Value(value=columns[column]),
            )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _links(folder: str) -> Iterable[str]:
    for name in _names(folder):
        try:
            yield os.readlink(f"{folder}/{name}")
        except OSError:
            continue
