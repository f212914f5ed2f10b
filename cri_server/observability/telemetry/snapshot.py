"""The server's numbers at one moment, taken on the event loop as plain values; `exposition` writes
them in a thread.

Durations and outcomes are counted all the time (`meters`); everything else is looked up when it is
asked for.
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
from cri_server.network.leases import Usage
from cri_server.observability import meters
from cri_server.rpc.server import Server
from cri_server.services import Services
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import Error

Labels = tuple[str, ...]


@dataclass(slots=True)
class Family:
    """One metric: `samples` by the values of `labels`. A counter's name has no `_total` here."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: Labels = ()
    samples: dict[Labels, float] = field(default_factory=dict)


@dataclass(slots=True)
class Histogram:
    """One metric: by the values of `labels` the counts per bucket of `meters.BOUNDS_S`, not summed
    up, and the sum in seconds."""

    name: str
    text: str
    labels: Labels
    samples: dict[Labels, tuple[list[int], float]]


Snapshot = list[Family | Histogram]


@dataclass(slots=True)
class Source:
    """What is measured."""

    services: Services
    server: Server
    streaming: StreamingServer

    async def take(self) -> Snapshot:
        """Everything there is."""
        leases = await self._leases()
        space = await asyncio.to_thread(os.statvfs, self.services.paths.root)
        return [
            _gauge("pyrunc_build_info", "Always 1; the version in its labels.", ("version", "python"), {(pyrunc.__version__, platform.python_version()): 1}),
            _histogram("pyrunc_call_duration_seconds", "Calls of the CRI by gRPC code, without those that stream.", ("call", "code"), meters.VERBS),
            _histogram("pyrunc_step_duration_seconds", "Steps that succeeded, of the verbs that are made of steps.", ("verb", "step"), meters.STEPS),
            _gauge("pyrunc_calls_running", "Calls that are being answered, streams among them.", (), {(): self.server.calls}),
            _gauge("pyrunc_operations_running", "Operations on pods and containers that are under way.", (), {(): len(self.services.running)}),
            *self._pods(),
            *self._processes(),
            *self._images(),
            _gauge("pyrunc_root_free_bytes", "What may still be written below the root directory.", (), {(): space.f_bavail * space.f_frsize}),
            _gauge("pyrunc_root_free_inodes", "Files that may still be made below the root directory.", (), {(): space.f_favail}),
            _gauge("pyrunc_network_attachments", "Sandboxes that are attached to the network.", (), {(): sum(s.network == "attached" for s in self.services.index.sandboxes)}),
            _gauge("pyrunc_network_leases", "Addresses that host-local has handed out.", ("network", "family"), {_network(u): u.taken for u in leases}),
            _gauge("pyrunc_network_addresses", "Addresses that host-local may hand out.", ("network", "family"), {_network(u): u.size for u in leases}),
        ]  # fmt: skip

    def problems(self) -> list[str]:
        """What keeps the server from doing its work; nothing when it is well."""
        found = [
            f"the zygote for {name} is gone" for name, z in self.services.zygotes.items() if z.lost
        ]
        try:
            space = os.statvfs(self.services.paths.root)
        except OSError as error:
            return [*found, f"{self.services.paths.root}: {error.strerror}"]
        if space.f_flag & os.ST_RDONLY:
            found.append(f"{self.services.paths.root} is on a file system that is read-only")
        if not space.f_bavail:
            found.append(f"no space left below {self.services.paths.root}")
        return found

    async def _leases(self) -> list[Usage]:
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
            _gauge("pyrunc_sandboxes", "Sandboxes by state.", ("state",), _counted(pods, "ready", "notready")),
            _gauge("pyrunc_containers", "Containers by state.", ("state",), _counted(containers, "created", "running", "exited", "unknown")),
            Family("pyrunc_container_exits", "counter", "Containers that have ended since the server started, by reason.", ("reason",), _labelled(meters.EXITS)),
        ]  # fmt: skip

    def _processes(self) -> Snapshot:
        sessions = _counted(self.streaming.sessions, "exec", "attach", "portforward")
        keeper = self.services.keeper
        alive = _labelled({name: z.pid is not None for name, z in self.services.zygotes.items()})
        return [
            _gauge("pyrunc_shims", "Shims by whether they answer.", ("state",), _labelled(self.services.shims.count())),
            _gauge("pyrunc_zygote_up", "Whether the process lives that forks shims, errands.", ("role",), alive),
            _gauge("pyrunc_keeper_up", "Whether the process lives with which pods outlive their shims.", (), {(): keeper is not None and keeper.pid > 0}),
            _gauge("pyrunc_sessions", "Streaming sessions that are open.", ("kind",), sessions),
            _gauge("pyrunc_event_subscribers", "Clients that are told of containers' events.", (), {(): self.services.events.subscribers}),
        ]  # fmt: skip

    def _images(self) -> Snapshot:
        usage = self.services.images.usage()
        return [
            _gauge("pyrunc_images", "Images.", (), {(): usage.images}),
            _gauge("pyrunc_image_bytes", "What images, unpacked and packed, have on the disk.", (), {(): usage.size_bytes}),
            _gauge("pyrunc_image_inodes", "Files that images have on the disk.", (), {(): usage.inodes}),
            _gauge("pyrunc_pulls_running", "Pulls that are under way.", (), {(): usage.pulls}),
        ]  # fmt: skip


def _gauge(name: str, text: str, labels: Labels, samples: Mapping[Labels, float]) -> Family:
    return Family(name, "gauge", text, labels, dict(samples))


def _histogram(name: str, text: str, labels: Labels, found: meters.Meters) -> Histogram:
    return Histogram(
        name, text, labels, {key: (list(d.counts), d.sum_s) for key, d in found.items()}
    )


def _counted(found: Mapping[str, int], *always: str) -> dict[Labels, float]:
    """A sample for each of `always`, also where there is none, so that an alert sees the change."""
    return _labelled({**dict.fromkeys(always, 0), **found})


def _labelled(found: Mapping[str, float]) -> dict[Labels, float]:
    return {(key,): value for key, value in found.items()}


def _network(usage: Usage) -> Labels:
    return usage.network, f"ipv{usage.version}"
