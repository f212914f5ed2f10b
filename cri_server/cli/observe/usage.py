"""`pyrunc-cri stats` and `statsp`: what containers and pods use. CPU is what was used between two
samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, selection
from cri_server.cli.arguments.selection import Selection
from cri_server.cli.connection.client import Client, container_names, shared_names
from cri_server.cli.output import formats
from cri_server.cli.output.formats import Column, Listing, Output
from cri_server.cli.output.show import size

SECONDS = click.FloatRange(0, 3600)


@dataclass(slots=True)
class Processor:
    """CPU time by id at the last sample and before, in nanoseconds: of the thing, and of the clock."""

    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: dict[str, tuple[int, int]] = field(default_factory=dict)

    def sample(self, found: Iterable[tuple[str, Any]]) -> None:
        """`found`: (id, CpuUsage)."""
        self.before = self.now
        self.now = {each: (cpu.usage_core_nano_seconds.value, cpu.timestamp) for each, cpu in found}

    def percent(self, identifier: str) -> str:
        """`12.50` of one CPU; `-` before the second sample."""
        if identifier not in self.before or identifier not in self.now:
            return "-"
        (used, at), (used_before, before) = self.now[identifier], self.before[identifier]
        return f"{100 * (used - used_before) / (at - before):.2f}" if at > before else "-"


def show(
    how: Output,
    sampled: Callable[[], list[Any]],
    make: Callable[[], Listing[Any]],
    seconds: float,
    watching: float | None,
) -> None:
    """Two samples, then the table; with `watching` each next one against the one before."""
    shows_rate = not how.quiet and how.format in ("table", "wide")
    if shows_rate or how.template is not None:
        sampled()
        time.sleep(seconds)
    formats.repeat(lambda: how.render_list(make(), sampled()), watching)


@click.command()
@click.argument(
    "target", required=False, metavar="[CONTAINER]", shell_complete=completion.containers
)
@selection.options("container")
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that do not run.")
@click.option(
    "--seconds",
    type=SECONDS,
    default=1.0,
    show_default=True,
    help="Between the two samples for CPU.",
)
@click.option(
    "--no-stream", is_flag=True, expose_value=False, help="Once, as it is without --watch."
)
@formats.options()
@formats.watch
@click.pass_obj
def stats(
    address: str,
    target: str | None,
    selection: Selection,
    everything: bool,
    seconds: float,
    how: Output,
    watching: float | None,
) -> None:
    """Show what containers use: CPU, memory, disk."""
    processor = Processor()
    with Client(address) as client:

        def sampled() -> list[api.ContainerStats]:
            chosen = (
                [client.container(target)]
                if target
                else selection.containers(client, everything=everything)
            )
            wanted = {c.id for c in chosen}
            response = client.runtime("ListContainerStats", api.ListContainerStatsRequest())
            found = [s for s in response.stats if s.attributes.id in wanted]
            processor.sample((s.attributes.id, s.cpu) for s in found)
            return sorted(found, key=lambda s: s.attributes.metadata.name)

        show(how, sampled, lambda: _containers(client, how, processor), seconds, watching)


def _containers(client: Client, how: Output, processor: Processor) -> Listing[api.ContainerStats]:
    pods = {p.id: p for p in client.pods()}
    of = {c.id: pods[c.pod_sandbox_id] for c in client.containers() if c.pod_sandbox_id in pods}
    shared = shared_names(pods.values())

    def pod(stats: api.ContainerStats, field: str = "name") -> str:
        found = of.get(stats.attributes.id)
        return str(getattr(found.metadata, field)) if found else ""

    def name(stats: api.ContainerStats) -> str:
        names = container_names(stats.attributes, of.get(stats.attributes.id))
        return names[-1] if pod(stats) in shared else names[min(1, len(names) - 1)]

    return Listing(
        "stats",
        (
            Column("CONTAINER", lambda s: how.short(s.attributes.id)),
            Column("NAMESPACE", lambda s: pod(s, "namespace"), wide=not shared),
            Column("POD", pod),
            Column("NAME", lambda s: s.attributes.metadata.name),
            Column("CPU %", lambda s: processor.percent(s.attributes.id)),
            Column("MEM", lambda s: size(s.memory.working_set_bytes.value)),
            Column("DISK", lambda s: size(s.writable_layer.used_bytes.value)),
            Column("INODES", lambda s: str(s.writable_layer.inodes_used.value)),
            Column("SWAP", lambda s: size(s.swap.swap_usage_bytes.value)),
            Column("RSS", lambda s: size(s.memory.rss_bytes.value), wide=True),
            Column("FAULTS", lambda s: str(s.memory.major_page_faults.value), wide=True),
        ),
        formats.plain,
        lambda s: s.attributes.id,
        name,
    )


@click.command()
@click.argument("target", required=False, metavar="[POD]", shell_complete=completion.pods)
@selection.options("pod")
@click.option(
    "--seconds",
    type=SECONDS,
    default=1.0,
    show_default=True,
    help="Between the two samples for CPU.",
)
@click.option(
    "--no-stream", is_flag=True, expose_value=False, help="Once, as it is without --watch."
)
@formats.options()
@formats.watch
@click.pass_obj
def statsp(
    address: str,
    target: str | None,
    selection: Selection,
    seconds: float,
    how: Output,
    watching: float | None,
) -> None:
    """Show what pods use: CPU, memory, processes, network."""
    processor = Processor()
    with Client(address) as client:

        def sampled() -> list[api.PodSandboxStats]:
            wanted = {p.id for p in ([client.pod(target)] if target else selection.pods(client))}
            response = client.runtime("ListPodSandboxStats", api.ListPodSandboxStatsRequest())
            found = [s for s in response.stats if s.attributes.id in wanted]
            processor.sample((s.attributes.id, s.linux.cpu) for s in found)
            return sorted(found, key=lambda s: s.attributes.metadata.name)

        show(how, sampled, lambda: _pods(how, processor), seconds, watching)


def _pods(how: Output, processor: Processor) -> Listing[api.PodSandboxStats]:
    return Listing(
        "stats",
        (
            Column("POD", lambda s: how.short(s.attributes.id)),
            Column("NAMESPACE", lambda s: s.attributes.metadata.namespace),
            Column("NAME", lambda s: s.attributes.metadata.name),
            Column("CPU %", lambda s: processor.percent(s.attributes.id)),
            Column("MEM", lambda s: size(s.linux.memory.working_set_bytes.value)),
            Column("PIDS", lambda s: str(s.linux.process.process_count.value)),
            Column("RX", lambda s: size(s.linux.network.default_interface.rx_bytes.value)),
            Column("TX", lambda s: size(s.linux.network.default_interface.tx_bytes.value)),
            Column("RSS", lambda s: size(s.linux.memory.rss_bytes.value), wide=True),
        ),
        formats.plain,
        lambda s: s.attributes.id,
        lambda s: f"{s.attributes.metadata.namespace}/{s.attributes.metadata.name}",
    )
