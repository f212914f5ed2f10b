"""`pyrunc-cri update`: changes the limits of running containers."""

from __future__ import annotations

from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options
from cri_server.cli.connection.client import Client
from cri_server.cli.manifest.pod_model import quantity
from cri_server.cli.output import formats
from cri_server.cli.output.report import for_each, report
from pyrunc.errors import InvalidArgument, InvalidSpec

DOCKER_UNITS = {"b": "", "k": "Ki", "m": "Mi", "g": "Gi", "kb": "Ki", "mb": "Mi", "gb": "Gi"}
PERIOD_US = 100_000  # kubelet's
# field of CRI -> the cgroup v2 controller that it needs
CONTROLLERS = {
    **dict.fromkeys(("cpu_period", "cpu_quota", "cpu_shares"), "cpu"),
    **dict.fromkeys(("memory_limit_in_bytes", "memory_swap_limit_in_bytes"), "memory"),
    **dict.fromkeys(("cpuset_cpus", "cpuset_mems"), "cpuset"),
}


def size_bytes(text: str, option: str) -> int:
    """Parse a number of bytes: `64Mi`, docker's `64m`, or `67108864`. Raises InvalidArgument;
    `option` is the option's name in the message."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = DOCKER_UNITS.get(text[len(number) :]) if number != text else None
    try:
        return int(quantity(number + unit if unit is not None else text, option))
    except InvalidSpec:
        raise InvalidArgument(f"{option} {text}: expected bytes such as 64Mi") from None


@click.command()
@options.names("CONTAINER...", completion.containers)
@click.option("-m", "--memory", metavar="SIZE", help="Memory limit: 64Mi, 64m, or bytes.")
@click.option("--memory-swap", metavar="SIZE", help="Limit of memory and swap together.")
@click.option(
    "--cpus",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="CPU time as a number of CPUs, such as 1.5.",
)
@click.option("--cpu-period", type=int, default=0, metavar="US", help="Period of --cpu-quota.")
@click.option(
    "--cpu-quota", type=int, default=0, metavar="US", help="CPU time per period; -1: no limit."
)
@click.option(
    "-c",
    "--cpu-share",
    "--cpu-shares",
    "shares",
    type=int,
    default=0,
    metavar="N",
    help="CPU weight relative to other containers; 1024 is one CPU.",
)
@click.option("--cpuset-cpus", default="", metavar="LIST", help="CPUs to run on, such as 0-2,4.")
@click.option("--cpuset-mems", default="", metavar="LIST", help="Memory nodes to use.")
@click.option(
    "--oom-score-adj",
    type=click.IntRange(-1000, 1000),
    default=0,
    metavar="N",
    help="Priority for the out-of-memory killer; higher is killed first.",
)
@click.pass_obj
def update(
    address: str,
    /,
    names: tuple[str, ...],
    memory: str | None,
    memory_swap: str | None,
    cpus: float | None,
    shares: int,
    **fields: Any,
) -> None:
    """Change the limits of containers. A limit without an option stays as it is."""
    if cpus is not None:
        if fields["cpu_quota"]:
            raise click.UsageError("--cpus and --cpu-quota exclude each other")
        fields["cpu_period"] = fields["cpu_period"] or PERIOD_US
        # The kernel refuses a quota of less than 1 ms (kernel/sched/core.c).
        fields["cpu_quota"] = max(1000, int(cpus * fields["cpu_period"]))
    limits = api.LinuxContainerResources(
        memory_limit_in_bytes=size_bytes(memory, "--memory") if memory else 0,
        memory_swap_limit_in_bytes=size_bytes(memory_swap, "--memory-swap") if memory_swap else 0,
        cpu_shares=shares,
        **fields,
    )
    if limits == api.LinuxContainerResources():
        raise click.UsageError("name at least one new limit, such as --memory 64Mi")
    with Client(address) as client:

        def act(name: str) -> None:
            request = api.UpdateContainerResourcesRequest(
                container_id=client.container(name).id, linux=limits
            )
            client.call(request)
            click.echo(name)

        for_each(names, act)
        for field in not_set(client, limits):
            report(
                f"warning: {field} is not set: this node lacks the cgroup v2 controller"
                f" {CONTROLLERS[field]}"
            )


def not_set(client: Client, limits: api.LinuxContainerResources) -> list[str]:
    """Return the limits that the server could not set because of a missing cgroup controller
    (`[cgroup] missing_controllers = "warn"`). Return an empty list if the server does not report
    its controllers."""
    status = formats.with_info(client.call(api.StatusRequest(verbose=True)))
    described = (status.get("info") or {}).get("config") or {}
    if described.get("missingControllers") != "warn":
        return []
    available = described.get("cgroupControllers") or []
    return [
        field
        for field, name in CONTROLLERS.items()
        if getattr(limits, field) and name not in available
    ]
