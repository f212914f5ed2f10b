"""Usage of containers and pods, read from their cgroups when asked.

On a host whose controllers are on v1 the v2 group has no memory files: memory is then added up over the group's processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.containers.anonymous_volumes import FOLDER
from cri_server.containers.spec import groups
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox
from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.cgroups.stats import Stats
from pyrunc.errors import Error
from pyrunc.kernel.process import stat
from pyrunc.kernel.usage import usage

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LAYER_AGE_S = 10.0
LAYER_REST = 10  # times as long as a walk took
DEFAULT_INTERFACE = "eth0"


class LayerSizes:
    """Sizes of writable layers. A layer is walked by one thread at a time and rests then, longer the longer that took: a
    container with millions of files must not keep the server busy."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, int, int, int]] = {}
        self._walks: dict[str, asyncio.Task[tuple[int, int, int]]] = {}

    async def of(self, container_id: str, root: Path) -> tuple[int, int, int]:
        """timestamp ns, bytes, inodes of the layer and the anonymous volumes in a container's folder; those of the last walk
        while another is under way."""
        known = self._known.get(container_id)
        if known is not None and (time.monotonic() < known[0] or container_id in self._walks):
            return known[1:]
        walk = self._walks.get(container_id)
        if walk is None:
            walk = self._walks[container_id] = asyncio.create_task(self._walk(container_id, root))
            walk.add_done_callback(lambda _: self._walks.pop(container_id, None))
        return await asyncio.shield(walk)

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


async def of_container(services: Services, container: Container) -> api.ContainerStats:
    """Attributes and writable layer always, usage while it runs."""
    result = api.ContainerStats()
    result.attributes.id = container.id
    result.attributes.metadata.CopyFrom(container.config.metadata)
    _copy(result.attributes.labels, container.config.labels)
    _copy(result.attributes.annotations, container.config.annotations)
    root = services.paths.container_root(container.id)
    stamp, used, inodes = await layers.of(container.id, root)
    result.writable_layer.timestamp = stamp
    result.writable_layer.fs_id.mountpoint = str(services.paths.images)
    result.writable_layer.used_bytes.value = used
    result.writable_layer.inodes_used.value = inodes
    if container.running:
        group = groups.place(container.cgroups_path, container.id)
        found = await asyncio.to_thread(measure, group)
        _fill(result.cpu, result.memory, found)
        _fill_swap(result.swap, found)
        _psi(result.io, found, "io")
    return result


async def of_containers(services: Services, containers: Iterable[Container]) -> list[api.ContainerStats]:
    """Of each; one that is removed meanwhile is left out."""
    found = []
    for container in containers:
        try:
            found.append(await of_container(services, container))
        except Error:
            continue
    return found


async def of_sandbox(services: Services, sandbox: Sandbox) -> api.PodSandboxStats:
    """Usage of the pod's parent cgroup when it has one of its own, of its members otherwise."""
    result = api.PodSandboxStats()
    result.attributes.id = sandbox.id
    result.attributes.metadata.CopyFrom(sandbox.config.metadata)
    _copy(result.attributes.labels, sandbox.config.labels)
    _copy(result.attributes.annotations, sandbox.config.annotations)
    linux = result.linux
    linux.SetInParent()
    containers = services.index.containers_of(sandbox)
    if sandbox.state == api.SANDBOX_READY:
        found, processes = await asyncio.to_thread(_measure_pod, sandbox, containers)
        _fill(linux.cpu, linux.memory, found)
        _psi(linux.io, found, "io")
        linux.process.timestamp = time.time_ns()
        linux.process.process_count.value = processes
        if sandbox.holder is not None and not sandbox.host_network:
            _network(linux.network, sandbox.holder.pid)
    linux.containers.extend(await of_containers(services, containers))
    return result


def measure(group: Cgroup) -> Stats:
    """The group's figures, completed from its processes where the v2 tree has no files for them."""
    found = group.stats()
    if found.memory is None:
        found.memory = _memory_of(group.processes())
    return found


def _measure_pod(sandbox: Sandbox, containers: list[Container]) -> tuple[Stats, int]:
    if sandbox.config.linux.cgroup_parent.strip("/"):
        driver = groups.driver_of(sandbox.cgroup_parent)
        path = naming.expand_slice(sandbox.cgroup_parent) if driver == "systemd" else sandbox.cgroup_parent
        pod = Cgroup(path, driver)
        return measure(pod), len(pod.processes())
    total, count = Stats(), 0
    members = [(sandbox.cgroups_path, sandbox.id)]
    members += [(c.cgroups_path, c.id) for c in containers if c.running]
    for cgroups_path, identifier in members:
        group = groups.place(cgroups_path, identifier)
        found = measure(group)
        count += len(group.processes())
        total.cpu = _sum(total.cpu, found.cpu)
        total.memory = _sum_memory(total.memory, found.memory)
    return total, count


def _sum(left: Mapping[str, int] | None, right: Mapping[str, int] | None) -> dict[str, int]:
    keys = {**(left or {}), **(right or {})}
    return {key: (left or {}).get(key, 0) + (right or {}).get(key, 0) for key in keys}


def _sum_memory(left: dict[str, Any] | None, right: dict[str, Any] | None) -> dict[str, Any]:
    left, right = left or {}, right or {}
    return {
        "current": left.get("current", 0) + right.get("current", 0),
        "stat": _sum(left.get("stat"), right.get("stat")),
    }


def _memory_of(pids: Iterable[int]) -> dict[str, Any]:
    resident = faults = major = 0
    for pid in pids:
        if (found := stat(pid)) is not None:
            faults, major = faults + found.minor_faults, major + found.major_faults
            resident += found.resident * PAGE_BYTES
    return {
        "current": resident,
        "stat": {"anon": resident, "inactive_file": 0, "pgfault": faults, "pgmajfault": major},
    }


def _fill(cpu: api.CpuUsage, memory: api.MemoryUsage, found: Stats) -> None:
    now = time.time_ns()
    cpu.timestamp = memory.timestamp = now
    cpu.usage_core_nano_seconds.value = (found.cpu or {}).get("usage_usec", 0) * 1000
    figures = found.memory or {}
    stat = figures.get("stat", {})
    used = figures.get("current", 0)
    working_set = max(0, used - stat.get("inactive_file", 0))
    memory.usage_bytes.value = used
    memory.working_set_bytes.value = working_set
    memory.rss_bytes.value = stat.get("anon", 0)
    memory.page_faults.value = stat.get("pgfault", 0)
    memory.major_page_faults.value = stat.get("pgmajfault", 0)
    limit = figures.get("max")
    if limit is not None:
        memory.available_bytes.value = max(0, limit - working_set)
    _psi(cpu, found, "cpu")
    _psi(memory, found, "memory")


def _fill_swap(swap: api.SwapUsage, found: Stats) -> None:
    figures = found.memory or {}
    if "swap_current" not in figures:
        return
    swap.timestamp = time.time_ns()
    used = figures["swap_current"] or 0
    swap.swap_usage_bytes.value = used
    if figures.get("swap_max") is not None:
        swap.swap_available_bytes.value = max(0, figures["swap_max"] - used)


def _psi(message: Any, found: Stats, name: str) -> None:
    """Pressure; the kernel counts microseconds, CRI nanoseconds."""
    for kind, figures in found.pressure.get(name, {}).items():
        data = getattr(message.psi, kind.capitalize())
        data.Total = int(figures["total"]) * 1000
        data.Avg10, data.Avg60, data.Avg300 = figures["avg10"], figures["avg60"], figures["avg300"]
        if name == "io":
            message.timestamp = time.time_ns()


def _network(usage: api.NetworkUsage, pid: int) -> None:
    """Counters of the namespace of `pid`, from its /proc/PID/net/dev; the default interface is always named."""
    usage.timestamp = time.time_ns()
    usage.default_interface.name = DEFAULT_INTERFACE
    try:
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() == "lo" or len(fields) < 11:
            continue
        entry = usage.interfaces.add(name=name.strip())
        for key, place in (("rx_bytes", 0), ("rx_errors", 2), ("tx_bytes", 8), ("tx_errors", 10)):
            getattr(entry, key).value = int(fields[place])
        if entry.name == DEFAULT_INTERFACE:
            usage.default_interface.CopyFrom(entry)


def _copy(target: Any, source: Mapping[str, str]) -> None:
    for key, value in source.items():
        target[key] = value
