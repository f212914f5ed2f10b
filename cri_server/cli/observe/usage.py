"""`pyrunc-cri stats` and `statsp`: show the resource usage of containers and pods. CPU usage is the
difference of two samples."""

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
    """CPU time and its timestamp by id, in nanoseconds, at the last sample and the one before."""

    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: dict[str, tuple[int, int]] = field(default_factory=dict)

    def sample(self, usages: Iterable[tuple[str, Any]]) -> None:
        """Store a sample: pairs of id and CpuUsage."""
        self.before = self.now
        self.now = {
            each: (cpu.usage_core_nano_seconds.value, cpu.timestamp) for each, cpu in usages
        }

    def percent(self, identifier: str) -> str:
        """Return the usage as `12.50` percent of one CPU; `-` before the second sample."""
        if identifier not in self.before or identifier not in self.now:
            return "-"
        (used, at), (used_before, before) = self.now[identifier], self.before[identifier]
        return f"{100 * (used - used_before) / (at - before):.2f}" if at > before else "-"


def show(
    output: Output,
    sampled: Callable[[], list[Any]],
    make: Callable[[], Listing[Any]],
    seconds: float,
    watching: float | None,
) -> None:
    """Take two samples and print the table; with `watching` repeat it with further samples."""
    shows_rate = not output.quiet and output.format in ("table", "wide")
    if shows_rate or output.template is not None:
        # CRI reports a counter of CPU time; a rate needs two samples.
        sampled()
        time.sleep(seconds)
    formats.repeat(lambda: output.render_list(make(), sampled()), watching)


def _common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `stats` and `statsp`."""
    for option in (
        formats.watch,
        formats.options(),
        click.option(
            "--no-stream", is_flag=True, expose_value=False, help="Print once, the default."
        ),
        click.option(
            "--seconds",
            type=SECONDS,
            default=1.0,
            show_default=True,
            help="The time between the two samples of CPU usage.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument(
    "target", required=False, metavar="[CONTAINER]", shell_complete=completion.containers
)
@selection.options("container")
@click.option("-a", "--all", "all_states", is_flag=True, help="Also containers that do not run.")
@_common_options
@click.pass_obj
def stats(
    address: str,
    target: str | None,
    selection: Selection,
    all_states: bool,
    seconds: float,
    output: Output,
    watching: float | None,
) -> None:
    """Show the CPU, memory and disk usage of containers."""
    processor = Processor()
    with Client(address) as client:

        def sampled() -> list[api.ContainerStats]:
            chosen = (
                [client.container(target)]
                if target
                else selection.containers(client, all_states=all_states)
            )
            ids = {c.id for c in chosen}
            response = client.runtime("ListContainerStats", api.ListContainerStatsRequest())
            usages = [s for s in response.stats if s.attributes.id in ids]
            processor.sample((s.attributes.id, s.cpu) for s in usages)
            return sorted(usages, key=lambda s: s.attributes.metadata.name)

        show(output, sampled, lambda: _containers(client, output, processor), seconds, watching)


def _containers(
    client: Client, output: Output, processor: Processor
) -> Listing[api.ContainerStats]:
    pods = {p.id: p for p in client.pods()}
    of = {c.id: pods[c.pod_sandbox_id] for c in client.containers() if c.pod_sandbox_id in pods}
    shared = shared_names(pods.values())

    def pod(stats: api.ContainerStats, field: str = "name") -> str:
        sandbox = of.get(stats.attributes.id)
        return str(getattr(sandbox.metadata, field)) if sandbox else ""

    def name(stats: api.ContainerStats) -> str:
        names = container_names(stats.attributes, of.get(stats.attributes.id))
        return names[-1] if pod(stats) in shared else names[min(1, len(names) - 1)]

    return Listing(
        "stats",
        (
            Column("CONTAINER", lambda s: output.short(s.attributes.id)),
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
@_common_options
@click.pass_obj
def statsp(
    address: str,
    target: str | None,
    selection: Selection,
    seconds: float,
    output: Output,
    watching: float | None,
) -> None:
    """Show the CPU, memory, process and network usage of pods."""
    processor = Processor()
    with Client(address) as client:

        def sampled() -> list[api.PodSandboxStats]:
            ids = {p.id for p in ([client.pod(target)] if target else selection.pods(client))}
            response = client.runtime("ListPodSandboxStats", api.ListPodSandboxStatsRequest())
            usages = [s for s in response.stats if s.attributes.id in ids]
            processor.sample((s.attributes.id, s.linux.cpu) for s in usages)
            return sorted(usages, key=lambda s: s.attributes.metadata.name)

        show(output, sampled, lambda: _pods(output, processor), seconds, watching)


def _pods(output: Output, processor: Processor) -> Listing[api.PodSandboxStats]:
    return Listing(
        "stats",
        (
            Column("POD", lambda s: output.short(s.attributes.id)),
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
