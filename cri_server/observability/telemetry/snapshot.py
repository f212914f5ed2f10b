"""A snapshot of the server's metrics, taken on the event loop; `exposition` writes it in a thread.

Durations and outcomes are counted at all times (`meters`); everything else is read at each scrape.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyrunc
from cri_server.api import api_pb2 as api
from cri_server.network.leases import LeaseUsage
from cri_server.observability import meters
from cri_server.rpc.server import Server
from cri_server.services import Services
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import Error

Labels = tuple[str, ...]

GAUGES: dict[str, tuple[str, Labels]] = {
    "pyrunc_build_info": ("Always 1; the version in its labels.", ("version", "python")),
    "pyrunc_calls_running": ("Calls that are being answered, including streams.", ()),
    "pyrunc_operations_running": ("Operations on pods and containers that are running.", ()),
    "pyrunc_sandboxes": ("Sandboxes by state.", ("state",)),
    "pyrunc_containers": ("Containers by state.", ("state",)),
    "pyrunc_shims": ("Pods by whether their shim answers.", ("state",)),
    "pyrunc_zygote_up": ("Whether the zygote runs, which forks shims and jobs.", ("role",)),
    "pyrunc_keeper_up": ("Whether the keeper runs, with which pods outlive their shims.", ()),
    "pyrunc_sessions": ("Open streaming sessions.", ("kind",)),
    "pyrunc_event_subscribers": ("Subscribers of container events.", ()),
    "pyrunc_images": ("Images.", ()),
    "pyrunc_image_bytes": ("Disk space of images, unpacked and packed.", ()),
    "pyrunc_image_inodes": ("Files that images have on the disk.", ()),
    "pyrunc_pulls_running": ("Pulls that are running.", ()),
    "pyrunc_root_free_bytes": ("Free space below the root directory.", ()),
    "pyrunc_root_free_inodes": ("Free inodes below the root directory.", ()),
    "pyrunc_network_attachments": ("Sandboxes that are attached to the network.", ()),
    "pyrunc_network_leases": (
        "Addresses that host-local has leased.",
        ("network", "family"),
    ),
    "pyrunc_network_addresses": ("Addresses that host-local manages.", ("network", "family")),
}
"""The help text of each gauge, and the names of its labels."""


@dataclass(slots=True)
class Family:
    """A metric. `samples` maps the values of `labels` to the metric's value. The `name` of a
    counter lacks the suffix `_total`: Prometheus' client library appends it."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: Labels = ()
    samples: dict[Labels, float] = field(default_factory=dict)


@dataclass(slots=True)
class Histogram:
    """A histogram. `samples` maps the values of `labels` to the counts per bucket of
    `meters.BOUNDS_S` (not cumulative) and the sum in seconds."""

    name: str
    text: str
    labels: Labels
    samples: dict[Labels, tuple[list[int], float]]


Snapshot = list[Family | Histogram]
Value = float | dict[Labels, float]
"""The value of a metric; for a metric with labels, its value for each tuple of label values."""


@dataclass(slots=True)
class MetricsSource:
    """Takes snapshots of the server's metrics, from its services, its CRI server and its streaming
    server."""

    services: Services
    server: Server
    streaming: StreamingServer

    async def take(self) -> Snapshot:
        """Read all metrics and return them as a snapshot."""
        leases = await self._leases()
        space = await asyncio.to_thread(os.statvfs, self.services.paths.root)
        values: dict[str, Value] = {
            "pyrunc_build_info": {(pyrunc.__version__, platform.python_version()): 1},
            "pyrunc_calls_running": self.server.calls,
            "pyrunc_operations_running": len(self.services.running),
            **self._pods(),
            **self._processes(),
            **self._images(),
            "pyrunc_root_free_bytes": space.f_bavail * space.f_frsize,
            "pyrunc_root_free_inodes": space.f_favail,
            "pyrunc_network_leases": {_network(u): u.taken for u in leases},
            "pyrunc_network_addresses": {_network(u): u.size for u in leases},
        }
        return [
            *(_gauge(name, value) for name, value in values.items()),
            Family(
                "pyrunc_container_exits",
                "counter",
                "Containers that have ended since the server started, by reason.",
                ("reason",),
                _labelled(meters.EXITS),
            ),
            _histogram(
                "pyrunc_call_duration_seconds",
                "Calls of the CRI by gRPC code, except streaming ones.",
                ("call", "code"),
                meters.VERBS,
            ),
            _histogram(
                "pyrunc_step_duration_seconds",
                "Steps that succeeded, of the verbs that are made of steps.",
                ("verb", "step"),
                meters.STEPS,
            ),
        ]

    def problems(self) -> list[str]:
        """Return the problems that prevent the server from running pods; empty when it is
        healthy."""
        problems = ["the zygote has ended"] if self.services.zygote.lost else []
        try:
            space = os.statvfs(self.services.paths.root)
        except OSError as error:
            return [*problems, f"{self.services.paths.root}: {error.strerror}"]
        if space.f_flag & os.ST_RDONLY:
            problems.append(f"{self.services.paths.root} is on a read-only file system")
        if not space.f_bavail:
            problems.append(f"no space left below {self.services.paths.root}")
        return problems

    async def _leases(self) -> list[LeaseUsage]:
        try:
            return await self.services.network.leases()
        except (Error, OSError):
            return []

    def _pods(self) -> dict[str, Value]:
        sandboxes, containers = self.services.index.sandboxes, self.services.index.containers
        pod_states = Counter(
            api.PodSandboxState.Name(s.state).removeprefix("SANDBOX_").lower() for s in sandboxes
        )  # type: ignore[arg-type]
        container_states = Counter(
            api.ContainerState.Name(c.state).removeprefix("CONTAINER_").lower() for c in containers
        )  # type: ignore[arg-type]
        return {
            "pyrunc_sandboxes": _counted(pod_states, "ready", "notready"),
            "pyrunc_containers": _counted(
                container_states, "created", "running", "exited", "unknown"
            ),
            "pyrunc_network_attachments": sum(s.network == "attached" for s in sandboxes),
        }

    def _processes(self) -> dict[str, Value]:
        services, keeper = self.services, self.services.keeper
        return {
            "pyrunc_shims": _labelled(services.shims.count()),
            # One zygote forks shims and jobs; earlier versions had one for each role.
            "pyrunc_zygote_up": {
                (role,): services.zygote.pid is not None for role in ("shims", "errands")
            },
            "pyrunc_keeper_up": keeper is not None and keeper.pid > 0,
            "pyrunc_sessions": _counted(self.streaming.sessions, "exec", "attach", "portforward"),
            "pyrunc_event_subscribers": services.events.subscribers,
        }

    def _images(self) -> dict[str, Value]:
        usage = self.services.images.usage()
        return {
            "pyrunc_images": usage.images,
            "pyrunc_image_bytes": usage.size_bytes,
            "pyrunc_image_inodes": usage.inodes,
            "pyrunc_pulls_running": usage.pulls,
        }


def _gauge(name: str, value: Value) -> Family:
    text, labels = GAUGES[name]
    return Family(name, "gauge", text, labels, value if isinstance(value, dict) else {(): value})


def _histogram(name: str, text: str, labels: Labels, durations: meters.Meters) -> Histogram:
    return Histogram(
        name, text, labels, {key: (list(d.counts), d.sum_s) for key, d in durations.items()}
    )


def _counted(counts: Mapping[str, int], *always: str) -> dict[Labels, float]:
    """Return the counts as samples. Keys in `always` without a count get 0, so that an alert sees
    their first change from 0 to 1."""
    return _labelled({**dict.fromkeys(always, 0), **counts})


def _labelled(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(key,): value for key, value in values.items()}


def _network(usage: LeaseUsage) -> Labels:
    return usage.network, f"ipv{usage.version}"
