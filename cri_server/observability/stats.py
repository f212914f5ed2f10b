"""CPU, memory, disk and network usage of containers and pods, read on request.

If the host has its memory controller on cgroup v1, cgroups of v2 have no memory files. The memory
of a cgroup is then the sum over its processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.containers.anonymous_volumes import FOLDER
from cri_server.services import Services
from cri_server.spec import groups
from cri_server.store.model import Container, Sandbox
from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.cgroups.stats import Memory, Stats
from pyrunc.errors import Error
from pyrunc.kernel.process import interface_counters, stat
from pyrunc.kernel.usage import usage

log = logging.getLogger(__name__)

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LAYER_AGE_S = 10.0
# As long as the time between two measurements of cAdvisor in kubelet. With windows of one second,
# kubelet sometimes reported 0 for a program that works once a second.
RATE_WINDOW_NS = 10_000_000_000
SAMPLE_DISTANCE_NS = 1_000_000_000  # shorter times measure the scheduler rather than the group
LAYER_REST = 10  # pause before a layer's next walk, as a multiple of its last walk's duration
WALK_WAIT_S = 1.0  # the time that statistics wait for a walk
WALKS = 4  # walks at the same time: they use the threads of all other work on disks
DEFAULT_INTERFACE = "eth0"
NO_MEMORY = Memory(0, {}, {})


@dataclass(frozen=True, slots=True)
class LayerSize:
    """The usage of a container's writable layer and anonymous volumes, measured at `time_ns`."""

    time_ns: int
    used_bytes: int
    inodes: int


class LayerSizes:
    """Measures and caches the sizes of writable layers, by container id. `roots`: the containers'
    folders, which hold the layers (`layer_roots`).

    Threads walk the layers, at most WALKS at the same time. The same layer is walked again only
    after a pause: LAYER_AGE_S, or LAYER_REST times the duration of its last walk if that is longer.
    So a container with millions of files does not keep the server busy.
    """

    def __init__(self) -> None:
        # By container id: when the size is old (monotonic), and the size.
        self._cache: dict[str, tuple[float, LayerSize]] = {}
        # By container id: until when callers wait for the walk, and the walk.
        self._walks: dict[str, tuple[float, asyncio.Task[None]]] = {}
        self._turns = asyncio.Semaphore(WALKS)

    async def of(self, roots: Mapping[str, Path]) -> dict[str, LayerSize]:
        """Return the sizes of the layers. Measures a layer again if its cached size is old. If this
        takes longer than WALK_WAIT_S, it continues in the background: the result has the layer's
        old size, or lacks the layer if it was never measured."""
        now = time.monotonic()
        for container_id, root in roots.items():
            cached = self._cache.get(container_id)
            if cached is None or now >= cached[0]:
                self._start_walk(container_id, root)
        started = [self._walks[each] for each in roots if each in self._walks]
        if walks := {walk: until for until, walk in started if until > now}:
            # This cancels no walk: other callers may wait for it.
            await asyncio.wait(walks, timeout=max(walks.values()) - now)
        return {each: self._cache[each][1] for each in roots if each in self._cache}

    def measured(self, roots: Mapping[str, Path]) -> tuple[int, int]:
        """Return the total bytes and inodes of the layers whose sizes are in the cache. Start to
        measure the remaining layers, but do not wait for the result."""
        for container_id, root in roots.items():
            if container_id not in self._cache:
                self._start_walk(container_id, root)
        sizes = [self._cache[each][1] for each in roots if each in self._cache]
        return sum(size.used_bytes for size in sizes), sum(size.inodes for size in sizes)

    def _start_walk(self, container_id: str, root: Path) -> None:
        """Start a task that measures the layer, unless one runs already."""
        if container_id not in self._walks:
            walk = asyncio.create_task(self._walk(container_id, root))
            self._walks[container_id] = time.monotonic() + WALK_WAIT_S, walk
            walk.add_done_callback(lambda done: self._forget(container_id, done))

    def _forget(self, container_id: str, walk: asyncio.Task[None]) -> None:
        self._walks.pop(container_id, None)
        if not walk.cancelled() and walk.exception() is not None:
            log.debug(
                "cannot measure the writable layer of container %s: %s",
                container_id,
                walk.exception(),
            )

    async def _walk(self, container_id: str, root: Path) -> None:
        async with self._turns:
            begin = time.monotonic()
            used_bytes, inodes = await asyncio.to_thread(_written, root)
        end = time.monotonic()
        # Removed containers leave their sizes in the cache. Clearing it costs one walk per layer.
        if len(self._cache) > 10_000:
            self._cache.clear()
        self._cache[container_id] = (
            end + max(LAYER_AGE_S, LAYER_REST * (end - begin)),
            LayerSize(time.time_ns(), used_bytes, inodes),
        )


def layer_roots(services: Services, containers: Iterable[Container]) -> dict[str, Path]:
    """Return, by container id, the folder that holds the container's writable layer."""
    return {each.id: services.paths.container_root(each.id) for each in containers}


def _written(root: Path) -> tuple[int, int]:
    """Return how many bytes and inodes the writable layer and the anonymous volumes use. `root`:
    the container's folder with both (`Paths.container_root`)."""
    usages = [usage(root / "upper")]
    if (root / FOLDER).exists():
        usages.append(usage(root / FOLDER))
    return sum(used for used, _ in usages), sum(inodes for _, inodes in usages)


layers = LayerSizes()


class CpuRates:
    """Computes the CPU usage of cgroups per second, as an average over at least RATE_WINDOW_NS. If
    the first sample of a cgroup is younger, the average begins at this sample."""

    def __init__(self) -> None:
        # By group: the time of each sample and the CPU time used until then, the oldest first.
        self._cache: dict[str, list[tuple[int, int]]] = {}

    def of(self, key: str, now_ns: int, used_ns: int) -> int | None:
        """Return the nanoseconds of CPU time that the cgroup `key` uses per second. `used_ns`: its
        total CPU time at `now_ns`.

        Returns None while the cgroup's first sample is younger than SAMPLE_DISTANCE_NS, or than
        RATE_WINDOW_NS if the cgroup has used no CPU time since that sample. If `used_ns` has
        decreased, the cgroup was deleted and created again: this call's sample is then the first.
        """
        samples = self._cache.get(key)
        if samples is None or used_ns < samples[-1][1]:
            if len(self._cache) > 10_000:
                self._cache.clear()
            self._cache[key] = [(now_ns, used_ns)]
            return None
        # Only the newest of the samples that are old enough is needed.
        while len(samples) > 1 and now_ns - samples[1][0] >= RATE_WINDOW_NS:
            del samples[0]
        if now_ns - samples[-1][0] >= SAMPLE_DISTANCE_NS:
            samples.append((now_ns, used_ns))
        elapsed_ns, delta_ns = now_ns - samples[0][0], used_ns - samples[0][1]
        if elapsed_ns < (SAMPLE_DISTANCE_NS if delta_ns else RATE_WINDOW_NS):
            return None
        return delta_ns * 1_000_000_000 // elapsed_ns


rates = CpuRates()


@dataclass(frozen=True, slots=True)
class CgroupFigures:
    """The measurements of one cgroup. `stats` is empty when the cgroup is gone."""

    stats: Stats
    processes: int


async def of_containers(
    services: Services, containers: Iterable[Container]
) -> list[api.ContainerStats]:
    """Return the stats of all containers: the size of each writable layer, and the usage of each
    running container. One thread measures all."""
    listed = list(containers)
    # One thread measures the whole list, each cgroup once: with a call of a thread for each
    # container, a list of 30 pods took 18.7 ms of processor time instead of 7.7.
    groups_of = {c.id: groups.place(c.cgroups_path, c.id) for c in listed if c.running}
    sizes = await layers.of(layer_roots(services, listed))
    figures = await asyncio.to_thread(_measure_all, groups_of)
    return [_container(services, each, sizes.get(each.id), figures.get(each.id)) for each in listed]


def _container(
    services: Services,
    container: Container,
    size: LayerSize | None,
    figures: CgroupFigures | None,
) -> api.ContainerStats:
    result = api.ContainerStats.FromString(_attributes(container))
    # kubelet counts a missing size as 0 (diskUsage, pkg/kubelet/eviction/helpers.go).
    if size is not None:
        layer = result.writable_layer
        layer.timestamp = size.time_ns
        layer.fs_id.mountpoint = str(services.paths.images)
        layer.used_bytes.value = size.used_bytes
        layer.inodes_used.value = size.inodes
    if figures is not None:
        _fill(container.id, result.cpu, result.memory, figures.stats)
        _fill_swap(result.swap, figures.stats)
        _psi(result.io, figures.stats, "io")
    return result


def _attributes(container: Container) -> bytes:
    """Return an encoded ContainerStats with the fields that never change: ids, labels and
    annotations."""

    def make() -> bytes:
        config = container.config
        attributes = api.ContainerAttributes(
            id=container.id,
            metadata=config.metadata,
            labels=config.labels,
            annotations=config.annotations,
        )
        return api.ContainerStats(attributes=attributes).SerializeToString()

    return container.cached_stats.get((), make)


async def of_sandboxes(
    services: Services, sandboxes: Iterable[Sandbox]
) -> list[api.PodSandboxStats]:
    """Return the stats of all pods: the usage of each pod's cgroup, or, if a pod has no cgroup, the
    sum over its containers and pause process. One thread reads all cgroups, each once."""
    pods = [(sandbox, services.index.containers_of(sandbox)) for sandbox in sandboxes]
    groups_of: dict[str, Cgroup] = {}
    for sandbox, containers in pods:
        groups_of |= {c.id: groups.place(c.cgroups_path, c.id) for c in containers if c.running}
        if sandbox.state == api.SANDBOX_READY:
            pod = _pod_group(sandbox)
            groups_of[sandbox.id] = pod or groups.place(sandbox.cgroups_path, sandbox.id)
    listed = (container for _, containers in pods for container in containers)
    sizes = await layers.of(layer_roots(services, listed))
    figures = await asyncio.to_thread(_measure_all, groups_of)
    return [_sandbox(services, *pod, sizes, figures) for pod in pods]


def _sandbox(
    services: Services,
    sandbox: Sandbox,
    containers: list[Container],
    sizes: Mapping[str, LayerSize],
    figures: Mapping[str, CgroupFigures],
) -> api.PodSandboxStats:
    result = api.PodSandboxStats.FromString(
        sandbox.cached_stats.get((), lambda: _pod_attributes(sandbox))
    )
    linux = result.linux
    if (own := figures.get(sandbox.id)) is not None:
        whole = (
            own
            if _pod_group(sandbox)
            else _added([own, *(figures[c.id] for c in containers if c.id in figures)])
        )
        _fill(sandbox.id, linux.cpu, linux.memory, whole.stats)
        _psi(linux.io, whole.stats, "io")
        linux.process.timestamp = time.time_ns()
        linux.process.process_count.value = whole.processes
        if sandbox.pause is not None and not sandbox.host_network:
            _network(linux.network, sandbox.pause.pid)
    for container in containers:
        linux.containers.append(
            _container(services, container, sizes.get(container.id), figures.get(container.id))
        )
    return result


def _pod_attributes(sandbox: Sandbox) -> bytes:
    config = sandbox.config
    attributes = api.PodSandboxAttributes(
        id=sandbox.id,
        metadata=config.metadata,
        labels=config.labels,
        annotations=config.annotations,
    )
    result = api.PodSandboxStats(attributes=attributes, linux=api.LinuxPodSandboxStats())
    return result.SerializeToString()


def _measure_all(groups_of: Mapping[str, Cgroup]) -> dict[str, CgroupFigures]:
    """Measure the usage of each cgroup; return the results by the keys of `groups_of`. A cgroup
    that cannot be read is omitted, because its container has ended."""
    figures = {}
    for key, group in groups_of.items():
        try:
            stats, pids = group.usage(), group.processes()
        # The container has ended meanwhile. Its error must not fail the call for all others.
        except Error:
            continue
        # The folder is gone. Zeros would look like a counter that was reset.
        if stats.cpu is None:
            continue
        if stats.memory is None:
            stats = stats.replace(memory=memory_of(pids))
        figures[key] = CgroupFigures(stats, len(pids))
    return figures


def _pod_group(sandbox: Sandbox) -> Cgroup | None:
    """Return the pod's cgroup, which kubelet created; None without one."""
    if not sandbox.config.linux.cgroup_parent.strip("/"):
        return None
    driver = groups.driver_of(sandbox.cgroup_parent)
    path = (
        naming.expand_slice(sandbox.cgroup_parent) if driver == "systemd" else sandbox.cgroup_parent
    )
    return Cgroup(path, driver)


def _added(members: list[CgroupFigures]) -> CgroupFigures:
    cpu, memory_stat = Counter[str](), Counter[str]()
    memory_bytes = processes = 0
    for member in members:
        memory = member.stats.memory or NO_MEMORY
        cpu.update(member.stats.cpu or {})
        memory_stat.update(memory.stat)
        memory_bytes += memory.current
        processes += member.processes
    return CgroupFigures(Stats(cpu, Memory(memory_bytes, memory_stat, {})), processes)


def memory_of(pids: Iterable[int]) -> Memory:
    """Return the memory of a cgroup as the sum over its processes, for a host with the memory
    controller on cgroup v1."""
    resident = faults = major = 0
    for pid in pids:
        if (process := stat(pid)) is not None:
            faults, major = faults + process.minor_faults, major + process.major_faults
            resident += process.resident * PAGE_BYTES
    return Memory(
        resident, {"anon": resident, "inactive_file": 0, "pgfault": faults, "pgmajfault": major}, {}
    )


def _fill(key: str, cpu: api.CpuUsage, memory: api.MemoryUsage, stats: Stats) -> None:
    """Fill `cpu` and `memory` with the usage in `stats`. `key`: the id of the container or sandbox;
    `rates` stores the CPU samples under it."""
    now = time.time_ns()
    cpu.timestamp = memory.timestamp = now
    # cpu.stat has the usage also without the controller cpu (admin-guide/cgroup-v2.rst, "CPU").
    used = (stats.cpu or {}).get("usage_usec", 0) * 1000
    cpu.usage_core_nano_seconds.value = used
    rate = rates.of(key, time.monotonic_ns(), used)
    if rate is not None:
        cpu.usage_nano_cores.value = rate
    figures = stats.memory or NO_MEMORY
    stat = figures.stat
    # The usage without inactive file pages, as in cAdvisor. kubelet evicts pods by this number.
    working_set = max(0, figures.current - stat.get("inactive_file", 0))
    memory.usage_bytes.value = figures.current
    memory.working_set_bytes.value = working_set
    memory.rss_bytes.value = stat.get("anon", 0)
    memory.page_faults.value = stat.get("pgfault", 0)
    memory.major_page_faults.value = stat.get("pgmajfault", 0)
    if figures.max is not None:
        memory.available_bytes.value = max(0, figures.max - working_set)
    _psi(cpu, stats, "cpu")
    _psi(memory, stats, "memory")


def _fill_swap(swap: api.SwapUsage, stats: Stats) -> None:
    memory = stats.memory
    if memory is None or memory.swap_current is None:
        return
    swap.timestamp = time.time_ns()
    swap.swap_usage_bytes.value = memory.swap_current
    if memory.swap_max is not None:
        swap.swap_available_bytes.value = max(0, memory.swap_max - memory.swap_current)


def _psi(message: Any, stats: Stats, name: str) -> None:
    """Fill the field `psi` of `message` with the pressure of the resource `name`. The kernel counts
    microseconds, CRI nanoseconds."""
    for kind, figures in stats.pressure.get(name, {}).items():
        data = getattr(message.psi, kind.capitalize())
        data.Total = int(figures["total"]) * 1000
        data.Avg10, data.Avg60, data.Avg300 = figures["avg10"], figures["avg60"], figures["avg300"]
        if name == "io":
            message.timestamp = time.time_ns()


def _network(usage: api.NetworkUsage, pid: int) -> None:
    """Fill `usage` with the counters of all interfaces in the network namespace of `pid`, from
    /proc/PID/net/dev. `usage.default_interface` gets the name DEFAULT_INTERFACE, and its
    counters if the namespace has this interface."""
    usage.timestamp = time.time_ns()
    usage.default_interface.name = DEFAULT_INTERFACE
    for name, columns in interface_counters(pid).items():
        entry = usage.interfaces.add(name=name)
        entry.rx_bytes.value, entry.rx_errors.value = columns[0], columns[2]
        entry.tx_bytes.value, entry.tx_errors.value = columns[8], columns[10]
        if name == DEFAULT_INTERFACE:
            usage.default_interface.CopyFrom(entry)
