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


@dataclass(slots=True)
class Family:
    """A metric: `samples` by the values of `labels`. The name of a counter lacks `_total`."""

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


@dataclass(slots=True)
class Source:
    """The objects that metrics are read from."""

    services: Services
    server: Server
    streaming: StreamingServer

    async def take(self) -> Snapshot:
        """Read all metrics."""
        leases = await self._leases()
        space = await asyncio.to_thread(os.statvfs, self.services.paths.root)
        return [
            _gauge(
                "pyrunc_build_info",
                "Always 1; the version in its labels.",
                ("version", "python"),
                {(pyrunc.__version__, platform.python_version()): 1},
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
            _value(
                "pyrunc_calls_running",
                "Calls that are being answered, including streams.",
                self.server.calls,
            ),
            _value(
                "pyrunc_operations_running",
                "Operations on pods and containers that are running.",
                len(self.services.running),
            ),
            *self._pods(),
            *self._processes(),
            *self._images(),
            _value(
                "pyrunc_root_free_bytes",
                "Free space below the root directory.",
                space.f_bavail * space.f_frsize,
            ),
            _value(
                "pyrunc_root_free_inodes", "Free inodes below the root directory.", space.f_favail
            ),
            _value(
                "pyrunc_network_attachments",
                "Sandboxes that are attached to the network.",
                sum(s.network == "attached" for s in self.services.index.sandboxes),
            ),
            _gauge(
                "pyrunc_network_leases",
                "Addresses that host-local has handed out.",
                ("network", "family"),
                {_network(u): u.taken for u in leases},
            ),
            _gauge(
                "pyrunc_network_addresses",
                "Addresses that host-local manages.",
                ("network", "family"),
                {_network(u): u.size for u in leases},
            ),
        ]

    def problems(self) -> list[str]:
        """The problems that prevent the server from running pods; empty when it is healthy."""
        problems = [
            f"the zygote for {name} has ended"
            for name, z in self.services.zygotes.items()
            if z.lost
        ]
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

    def _pods(self) -> Snapshot:
        index = self.services.index
        pods = Counter(
            api.PodSandboxState.Name(s.state).removeprefix("SANDBOX_").lower()
            for s in index.sandboxes
        )  # type: ignore[arg-type]
        containers = Counter(
            api.ContainerState.Name(c.state).removeprefix("CONTAINER_").lower()
            for c in index.containers
        )  # type: ignore[arg-type]
        return [
            _gauge(
                "pyrunc_sandboxes",
                "Sandboxes by state.",
                ("state",),
                _counted(pods, "ready", "notready"),
            ),
            _gauge(
                "pyrunc_containers",
                "Containers by state.",
                ("state",),
                _counted(containers, "created", "running", "exited", "unknown"),
            ),
            Family(
                "pyrunc_container_exits",
                "counter",
                "Containers that have ended since the server started, by reason.",
                ("reason",),
                _labelled(meters.EXITS),
            ),
        ]

    def _processes(self) -> Snapshot:
        sessions = _counted(self.streaming.sessions, "exec", "attach", "portforward")
        keeper = self.services.keeper
        alive = _labelled({name: z.pid is not None for name, z in self.services.zygotes.items()})
        return [
            _gauge(
                "pyrunc_shims",
                "Shims by whether they answer.",
                ("state",),
                _labelled(self.services.shims.count()),
            ),
            _gauge(
                "pyrunc_zygote_up",
                "Whether the zygote that forks shims, or jobs, runs.",
                ("role",),
                alive,
            ),
            _value(
                "pyrunc_keeper_up",
                "Whether the keeper runs, with which pods outlive their shims.",
                keeper is not None and keeper.pid > 0,
            ),
            _gauge("pyrunc_sessions", "Open streaming sessions.", ("kind",), sessions),
            _value(
                "pyrunc_event_subscribers",
                "Subscribers of container events.",
                self.services.events.subscribers,
            ),
        ]

    def _images(self) -> Snapshot:
        usage = self.services.images.usage()
        return [
            _value("pyrunc_images", "Images.", usage.images),
            _value(
                "pyrunc_image_bytes", "Disk space of images, unpacked and packed.", usage.size_bytes
            ),
            _value("pyrunc_image_inodes", "Files that images have on the disk.", usage.inodes),
            _value("pyrunc_pulls_running", "Pulls that are running.", usage.pulls),
        ]


def _value(name: str, text: str, value: float) -> Family:
    """A gauge without labels."""
    return _gauge(name, text, (), {(): value})


def _gauge(name: str, text: str, labels: Labels, samples: Mapping[Labels, float]) -> Family:
    return Family(name, "gauge", text, labels, dict(samples))


def _histogram(name: str, text: str, labels: Labels, durations: meters.Meters) -> Histogram:
    return Histogram(
        name, text, labels, {key: (list(d.counts), d.sum_s) for key, d in durations.items()}
    )


def _counted(counts: Mapping[str, int], *always: str) -> dict[Labels, float]:
    """Return the samples of `counts`, with 0 for missing keys of `always`: an alert then sees the
    change from 0 to 1."""
    return _labelled({**dict.fromkeys(always, 0), **counts})


def _labelled(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(key,): value for key, value in values.items()}


def _network(usage: LeaseUsage) -> Labels:
    return usage.network, f"ipv{usage.version}"
