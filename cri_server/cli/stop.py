"""`pyrunc-cri stop` and `rm`: pods and containers end, by name or id."""

from __future__ import annotations

from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import folders
from cri_server.cli.client import Client
from pyrunc.errors import NotFound

GRACE_S = 10
SECONDS = click.IntRange(0, (1 << 31) - 1)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="POD|CONTAINER...")
@click.option(
    "-t",
    "--time",
    "grace_s",
    type=SECONDS,
    default=GRACE_S,
    show_default=True,
    help="Seconds before SIGKILL.",
)
@click.pass_obj
def stop(address: str, names: tuple[str, ...], grace_s: int) -> None:
    """Stop pods, or single containers."""
    with Client(address) as client:
        for name in names:
            try:
                stop_pod(client, client.pod(name).id, grace_s)
            except NotFound:
                stop_container(client, client.container(name).id, grace_s)
            click.echo(name)


@click.command()
@click.argument("names", nargs=-1, metavar="POD|CONTAINER...")
@click.option("-a", "--all", "everything", is_flag=True, help="All pods.")
@click.option(
    "-t", "--time", "grace_s", type=SECONDS, default=0, show_default=True, help="Seconds before SIGKILL."
)
@folders.option("Where `run` made the pod's folder.")
@click.pass_obj
def rm(address: str, names: tuple[str, ...], everything: bool, grace_s: int, folder: Path) -> None:
    """Stop and remove pods with their containers, or single containers."""
    if bool(names) == everything:
        raise click.UsageError("name what to remove, or say --all")
    with Client(address) as client:
        for name in names or [p.id for p in client.pods()]:
            try:
                pod = client.pod(name).id
                remove_pod(client, pod, grace_s)
                folders.remove(folder, pod)
            except NotFound:
                found = client.container(name).id
                stop_container(client, found, grace_s)
                client.runtime("RemoveContainer", api.RemoveContainerRequest(container_id=found))
            click.echo(name)


def stop_pod(client: Client, pod: str, grace_s: int) -> None:
    """Containers get `grace_s`, then the sandbox is stopped."""
    for container in client.containers(pod_sandbox_id=pod):
        stop_container(client, container.id, grace_s)
    client.runtime("StopPodSandbox", api.StopPodSandboxRequest(pod_sandbox_id=pod))


def remove_pod(client: Client, pod: str, grace_s: int) -> None:
    """Stop and remove a pod with its containers."""
    stop_pod(client, pod, grace_s)
    client.runtime("RemovePodSandbox", api.RemovePodSandboxRequest(pod_sandbox_id=pod))


def stop_container(client: Client, container: str, grace_s: int) -> None:
    """Stop one container."""
    request = api.StopContainerRequest(container_id=container, timeout=grace_s)
    client.runtime("StopContainer", request, grace_s + 30.0)
