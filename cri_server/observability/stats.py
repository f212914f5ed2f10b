"""Usage of containers and pods, read from their cgroups when asked.

On a host whose controllers are on v1 the v2 group has no memory files: memory is then added up over
the group's processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
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
from pyrunc.kernel.process import stat
from pyrunc.kernel.usage import usage

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LAYER_AGE_S = 10.0
log = logging.getLogger(__name__)

RATE_WINDOW_NS = 1_000_000_000  # shorter ones tell more about the scheduler than about the group
LAYER_REST = 10  # times as long as a walk took
DEFAULT_INTERFACE = "eth0"
NO_MEMORY = Memory(0, {}, {})


class LayerSizes:
    """Sizes of writable layers. A layer is walked by one thread at a time and rests then, longer
    the longer that took: a container with millions of files must not keep the server busy."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, int, int, int]] = {}
        self._walks: dict[str, asyncio.Task[tuple[int, int, int]]] = {}

    async def of(self, container_id: str, root: Path) -> tuple[int, int, int]:
        """timestamp ns, bytes, inodes of the layer and the anonymous volumes in a container's
        folder; those of the last walk while another is under way."""
        known = self._known.get(container_id)
        if known is not None and (time.monotonic() < known[0] or container_id in self._walks):
            return known[1:]
        walk = self._walks.get(container_id)
        if walk is None:
            walk = self._walks[container_id] = asyncio.create_task(self._walk(container_id, root))
            walk.add_done_callback(lambda _: self._walks.pop(container_id, None))
        return await asyncio.shield(walk)

    def measured(self, roots: Mapping[str, Path]) -> tuple[int, int]:
        """Bytes and inodes of all these containers' layers, by what is known of them: nobody waits
        for a walk here. One is begun for a layer that was never measured."""
        for container_id, root in roots.items():
            if container_id not in self._known and container_id not in self._walks:
                walk = self._walks[container_id] = asyncio.create_task(
                    self._walk(container_id, root)
                )
                walk.add_done_callback(lambda done, name=container_id: self._forget(name, done))  # type: ignore[misc]
        found = [self._known[container_id] for container_id in roots if container_id in self._known]
        return sum(used for _, _, used, _ in found), sum(inodes for _, _, _, inodes in found)

    def _forget(self, container_id: str, walk: asyncio.Task[tuple[int, int, int]]) -> None:
        self._walks.pop(container_id, None)
        if not walk.cancelled() and walk.exception() is not None:
            log.debug("the writable layer of %s: %s", container_id, walk.exception())

    async def _walk(self, container_id: str, root: Path) -> tuple[int, int, int]:
        begin = time.monotonic()
        used, inodes = await asyncio.to_thread(_written, root)
        end = time.monotonic()
        found = (time.time_ns(), used, inodes)
        if len(self._known) > 10_000:
            self._known.clear()
        self._known[container_id] = (end + max(LAYER_AGE_S, LAYER_REST * (end - begin)), *found)
        return found


def _written(root: Path) -> tuple[int, int]:
    """Bytes and inodes of what a container may write to on the node's disk."""
    found = [usage(root / "upper")]
    if (root / FOLDER).exists():
        found.append(usage(root / FOLDER))
    return sum(used for used, _ in found), sum(inodes for _, inodes in found)


layers = LayerSizes()


class CpuRates:
    """How fast groups use the CPU: between the sample of now and the last one that is old
    enough."""

    def __init__(self) -> None:
        self._known: dict[
            str, tuple[int, int, int | None]
        ] = {}  # when, used until then, and the rate until then

    def of(self, key: str, now_ns: int, used_ns: int) -> int | None:
        """Nanoseconds of CPU time in a second; None with the first sample, and after one that goes
        back: another group."""
        known = self._known.get(key)
        if known is not None and used_ns >= known[1] and now_ns - known[0] < RATE_WINDOW_NS:
            return known[2]
        rate = None
        if known is not None and used_ns >= known[1]:
            rate = (used_ns - known[1]) * 1_000_000_000 // (now_ns - known[0])
        if len(self._known) > 10_000:
            self._known.clear()
        self._known[key] = (now_ns, used_ns, rate)
        return rate


rates = CpuRates()


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one group. `stats` is empty when the group is gone."""

    stats: Stats
    processes: int


async def of_container(services: Services, container: Container) -> api.ContainerStats:
    """Attributes and writable layer always, usage while it runs."""
    (result,) = await of_containers(services, [container])
    return result


async def of_containers(
    services: Services, containers: Iterable[Container]
) -> list[api.ContainerStats]:
    """Of each, measured together in one thread."""
    wanted = list(containers)
    groups_of = {c.id: groups.place(c.cgroups_path, c.id) for c in wanted if c.running}
    figures = await asyncio.to_thread(_measure_all, groups_of)
    return [
        await _container(services, container, figures.get(container.id)) for container in wanted
    ]


async def _container(
    services: Services, container: Container, figures: Figures | None
) -> api.ContainerStats:
    result = api.ContainerStats.FromString(_attributes(services, container))
    stamp, used, inodes = await layers.of(container.id, services.paths.container_root(container.id))
    result.writable_layer.timestamp = stamp
    result.writable_layer.used_bytes.value = used
    result.writable_layer.inodes_used.value = inodes
    if figures is not None:
        _fill(container.id, result.cpu, result.memory, figures.stats)
        _fill_swap(result.swap, figures.stats)
        _psi(result.io, figures.stats, "io")
    return result


def _attributes(services: Services, container: Container) -> bytes:
    """The message with what never changes, in its wire form."""

    def make() -> bytes:
        result = api.ContainerStats()
        result.attributes.id = container.id
        result.attributes.metadata.CopyFrom(container.config.metadata)
        _copy(result.attributes.labels, container.config.labels)
        _copy(result.attributes.annotations, container.config.annotations)
        result.writable_layer.fs_id.mountpoint = str(services.paths.images)
        return result.SerializeToString()

    return container.kept_stats.get((), make)


async def of_sandbox(services: Services, sandbox: Sandbox) -> api.PodSandboxStats:
    """Usage of the pod's parent cgroup when it has one of its own, of its members otherwise."""
    (result,) = await of_sandboxes(services, [sandbox])
    return result


async def of_sandboxes(
    services: Services, sandboxes: Iterable[Sandbox]
) -> list[api.PodSandboxStats]:
    """Of each, measured together in one thread; a group is measured once, though its pod counts it
    too."""
    wanted = [(sandbox, services.index.containers_of(sandbox)) for sandbox in sandboxes]
    groups_of: dict[str, Cgroup] = {}
    for sandbox, containers in wanted:
        groups_of |= {c.id: groups.place(c.cgroups_path, c.id) for c in containers if c.running}
        if sandbox.state == api.SANDBOX_READY:
            pod = _pod_group(sandbox)
            groups_of[sandbox.id] = pod or groups.place(sandbox.cgroups_path, sandbox.id)
    figures = await asyncio.to_thread(_measure_all, groups_of)
    return [
        await _sandbox(services, sandbox, containers, figures) for sandbox, containers in wanted
    ]


async def _sandbox(
    services: Services,
    sandbox: Sandbox,
    containers: list[Container],
    figures: Mapping[str, Figures],
) -> api.PodSandboxStats:
    result = api.PodSandboxStats.FromString(
        sandbox.kept_stats.get((), lambda: _pod_attributes(sandbox))
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
        linux.containers.append(await _container(services, container, figures.get(container.id)))
    return result


def _pod_attributes(sandbox: Sandbox) -> bytes:
    result = api.PodSandboxStats()
    result.attributes.id = sandbox.id
    result.attributes.metadata.CopyFrom(sandbox.config.metadata)
    _copy(result.attributes.labels, sandbox.config.labels)
    _copy(result.attributes.annotations, sandbox.config.annotations)
    result.linux.SetInParent()
    return result.SerializeToString()


def measure(group: Cgroup) -> tuple[Stats, Memory]:
    """All figures of the group, memory from its processes where the v2 tree has no files for it."""
    found = group.stats()
    return found, found.memory or _memory_of(group.processes())


def _measure_all(wanted: Mapping[str, Cgroup]) -> dict[str, Figures]:
    """Figures by the same keys; a group that cannot be read has none."""
    found = {}
    for key, group in wanted.items():
        try:
            stats, pids = group.usage(), group.processes()
        except Error:
            continue
        if stats.memory is None:
            stats.memory = _memory_of(pids)
        found[key] = Figures(stats, len(pids))
    return found


def _pod_group(sandbox: Sandbox) -> Cgroup | None:
    """The group that kubelet made for the pod."""
    if not sandbox.config.linux.cgroup_parent.strip("/"):
        return None
    driver = groups.driver_of(sandbox.cgroup_parent)
    path = (
        naming.expand_slice(sandbox.cgroup_parent) if driver == "systemd" else sandbox.cgroup_parent
    )
    return Cgroup(path, driver)


def _added(members: list[Figures]) -> Figures:
    total = Stats()
    for member in members:
        total.cpu = _sum(total.cpu, member.stats.cpu)
        total.memory = _sum_memory(total.memory, member.stats.memory)
    return Figures(total, sum(member.processes for member in members))


def _sum(left: Mapping[str, int] | None, right: Mapping[str, int] | None) -> dict[str, int]:
    keys = {**(left or {}), **(right or {})}
    return {key: (left or {}).get(key, 0) + (right or {}).get(key, 0) for key in keys}


def _sum_memory(left: Memory | None, right: Memory | None) -> Memory:
    left, right = left or NO_MEMORY, right or NO_MEMORY
    return Memory(left.current + right.current, _sum(left.stat, right.stat), {})


def _memory_of(pids: Iterable[int]) -> Memory:
    resident = faults = major = 0
    for pid in pids:
        if (found := stat(pid)) is not None:
            faults, major = faults + found.minor_faults, major + found.major_faults
            resident += found.resident * PAGE_BYTES
    return Memory(
        resident, {"anon": resident, "inactive_file": 0, "pgfault": faults, "pgmajfault": major}, {}
    )


def _fill(key: str, cpu: api.CpuUsage, memory: api.MemoryUsage, found: Stats) -> None:
    """`key`: what tells this group from others, over several samples."""
    now = time.time_ns()
    cpu.timestamp = memory.timestamp = now
    used = (found.cpu or {}).get("usage_usec", 0) * 1000
    cpu.usage_core_nano_seconds.value = used
    rate = rates.of(key, time.monotonic_ns(), used)
    if rate is not None:
        cpu.usage_nano_cores.value = rate
    figures = found.memory or NO_MEMORY
    stat = figures.stat
    working_set = max(0, figures.current - stat.get("inactive_file", 0))
    memory.usage_bytes.value = figures.current
    memory.working_set_bytes.value = working_set
    memory.rss_bytes.value = stat.get("anon", 0)
    memory.page_faults.value = stat.get("pgfault", 0)
    memory.major_page_faults.value = stat.get("pgmajfault", 0)
    if figures.max is not None:
        memory.available_bytes.value = max(0, figures.max - working_set)
    _psi(cpu, found, "cpu")
    _psi(memory, found, "memory")


def _fill_swap(swap: api.SwapUsage, found: Stats) -> None:
    memory = found.memory
    if memory is None or memory.swap_current is None:
        return
    swap.timestamp = time.time_ns()
    swap.swap_usage_bytes.value = memory.swap_current
    if memory.swap_max is not None:
        swap.swap_available_bytes.value = max(0, memory.swap_max - memory.swap_current)


def _psi(message: Any, found: Stats, name: str) -> None:
    """Pressure; the kernel counts microseconds, CRI nanoseconds."""
    for kind, figures in found.pressure.get(name, {}).items():
        data = getattr(message.psi, kind.capitalize())
        data.Total = int(figures["total"]) * 1000
        data.Avg10, data.Avg60, data.Avg300 = figures["avg10"], figures["avg60"], figures["avg300"]
        if name == "io":
            message.timestamp = time.time_ns()


def _network(usage: api.NetworkUsage, pid: int) -> None:
    """Counters of the namespace of `pid`, from its /proc/PID/net/dev; the default interface is
    always named."""
    usage.timestamp = time.time_ns()
    usage.default_interface.name = DEFAULT_INTERFACE
    try:
        with open(f"/proc/{pid}/net/dev", "rb", buffering=0) as file:
            lines = file.read().decode().splitlines()[2:]
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() == "lo" or len(fields) < 11:
            continue
        entry = usage.interfaces.add(name=name.strip())
        entry.rx_bytes.value, entry.rx_errors.value = int(fields[0]), int(fields[2])
        entry.tx_bytes.value, entry.tx_errors.value = int(fields[8]), int(fields[10])
        if entry.name == DEFAULT_INTERFACE:
            usage.default_interface.CopyFrom(entry)


def _copy(target: Any, source: Mapping[str, str]) -> None:
    for key, value in source.items():
        target[key] = value
