"""`pyrunc-cri stats` and `statsp`: show the resource usage of containers and pods. The CPU rate is
computed from two samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options, selection
from cri_server.cli.arguments.selection import Selection
from cri_server.cli.connection.client import Client, shared_names, shortest_name
from cri_server.cli.output import formats
from cri_server.cli.output.formats import Column, Listing, OutputOptions
from cri_server.cli.output.show import size

SECONDS = click.FloatRange(0, 3600)


@dataclass(slots=True)
class CpuSamples:
    """The last two samples of CPU usage: for each id the CPU time and the sample's timestamp, both
    in nanoseconds."""

    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: dict[str, tuple[int, int]] = field(default_factory=dict)

    def sample(self, usages: Iterable[tuple[str, Any]]) -> None:
        """Store a sample. `usages`: pairs of id and CRI's CpuUsage."""
        self.before = self.now
        self.now = {
            each: (cpu.usage_core_nano_seconds.value, cpu.timestamp) for each, cpu in usages
        }

    def percent(self, identifier: str) -> str:
        """Return the CPU rate of an object in percent of one CPU, such as `12.50`; `-` if a sample
        lacks the object."""
        if identifier not in self.before or identifier not in self.now:
            return "-"
        (used, at), (used_before, before) = self.now[identifier], self.before[identifier]
        return f"{100 * (used - used_before) / (at - before):.2f}" if at > before else "-"


@dataclass(frozen=True, slots=True)
class _View:
    """Prints resource usages with the options of `stats` and `statsp`. `seconds`: the time between
    the two samples of CPU usage; `watching`: the interval of --watch in seconds, or None."""

    output: OutputOptions
    seconds: float
    watching: float | None

    def show(
        self,
        client: Client,
        request: Any,
        chosen: Callable[[], Iterable[Any]],
        cpu: Callable[[Any], Any],
        listing: Callable[[CpuSamples], Listing[Any]],
    ) -> None:
        """Print the resource usage of the objects that `chosen` returns. Repeats if `watching` is
        set. CPU rates, in tables and for templates, need two samples, `seconds` apart.

        `request`: CRI's request for the usage of all objects; `cpu`: returns the CpuUsage in an
        object's usage; `listing`: returns the Listing of the usages; its argument has the CPU
        rates."""
        samples = CpuSamples()

        def sampled() -> list[Any]:
            ids = {each.id for each in chosen()}
            usages = [each for each in client.call(request).stats if each.attributes.id in ids]
            samples.sample((each.attributes.id, cpu(each)) for each in usages)
            return sorted(usages, key=lambda each: each.attributes.metadata.name)

        output = self.output
        shows_rate = not output.quiet and output.format in ("table", "wide")
        if shows_rate or output.template is not None:
            # CRI reports a counter of CPU time; a rate needs two samples.
            sampled()
            time.sleep(self.seconds)
        formats.repeat(lambda: output.render_list(listing(samples), sampled()), self.watching)


_common_options = options.add(
    click.option(
        "--seconds",
        type=SECONDS,
        default=1.0,
        show_default=True,
        help="The time between the two samples of CPU usage.",
    ),
    click.option("--no-stream", is_flag=True, expose_value=False, help="Print once, the default."),
    formats.options(),
    formats.watch,
)


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
    output: OutputOptions,
    watching: float | None,
) -> None:
    """Show the CPU, memory and disk usage of containers."""
    with Client(address) as client:

        def chosen() -> list[api.Container]:
            if target:
                return [client.container(target)]
            return selection.containers(client, all_states=all_states)

        _View(output, seconds, watching).show(
            client,
            api.ListContainerStatsRequest(),
            chosen,
            lambda stats: stats.cpu,
            lambda samples: _containers(client, output, samples),
        )


def _containers(
    client: Client, output: OutputOptions, samples: CpuSamples
) -> Listing[api.ContainerStats]:
    pods = {p.id: p for p in client.pods()}
    of = {c.id: pods[c.pod_sandbox_id] for c in client.containers() if c.pod_sandbox_id in pods}
    shared = shared_names(pods.values())

    def pod(stats: api.ContainerStats, field: str = "name") -> str:
        sandbox = of.get(stats.attributes.id)
        return str(getattr(sandbox.metadata, field)) if sandbox else ""

    def name(stats: api.ContainerStats) -> str:
        return shortest_name(stats.attributes, of.get(stats.attributes.id), shared)

    def layer(stats: api.ContainerStats, text: str) -> str:
        return text if stats.HasField("writable_layer") else "-"  # the server is measuring it

    return Listing(
        "stats",
        (
            Column("CONTAINER", lambda s: output.short(s.attributes.id)),
            Column("NAMESPACE", lambda s: pod(s, "namespace"), wide=not shared),
            Column("POD", pod),
            Column("NAME", lambda s: s.attributes.metadata.name),
            Column("CPU %", lambda s: samples.percent(s.attributes.id)),
            Column("MEM", lambda s: size(s.memory.working_set_bytes.value)),
            Column("DISK", lambda s: layer(s, size(s.writable_layer.used_bytes.value))),
            Column("INODES", lambda s: layer(s, str(s.writable_layer.inodes_used.value))),
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
    output: OutputOptions,
    watching: float | None,
) -> None:
    """Show the CPU, memory, process and network usage of pods."""
    with Client(address) as client:
        _View(output, seconds, watching).show(
            client,
            api.ListPodSandboxStatsRequest(),
            lambda: [client.pod(target)] if target else selection.pods(client),
            lambda stats: stats.linux.cpu,
            lambda samples: _pods(output, samples),
        )


def _pods(output: OutputOptions, samples: CpuSamples) -> Listing[api.PodSandboxStats]:
    return Listing(
        "stats",
        (
            Column("POD", lambda s: output.short(s.attributes.id)),
            Column("NAMESPACE", lambda s: s.attributes.metadata.namespace),
            Column("NAME", lambda s: s.attributes.metadata.name),
            Column("CPU %", lambda s: samples.percent(s.attributes.id)),
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
