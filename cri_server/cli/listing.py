"""`pyrunc-cri ps` and `pods`: what runs."""

from __future__ import annotations

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.client import Client
from cri_server.cli.show import POD_STATES, SHORT, STATES, age, table


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that do not run.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.pass_obj
def ps(address: str, everything: bool, quiet: bool) -> None:
    """List containers."""
    with Client(address) as client:
        wanted = {} if everything else {"state": api.ContainerStateValue(state=api.CONTAINER_RUNNING)}
        found = sorted(client.containers(**wanted), key=lambda c: -c.created_at)
        if quiet:
            for container in found:
                click.echo(container.id)
            return
        pods = {p.id: p.metadata.name for p in client.pods()}
        rows = [
            (
                c.id[:SHORT],
                pods.get(c.pod_sandbox_id, c.pod_sandbox_id[:SHORT]),
                c.metadata.name,
                STATES.get(c.state, "?"),
                age(c.created_at),
                c.image.user_specified_image or c.image.image,
            )
            for c in found
        ]
        click.echo(table(("CONTAINER", "POD", "NAME", "STATE", "AGE", "IMAGE"), rows))


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.pass_obj
def pods(address: str, quiet: bool) -> None:
    """List pods."""
    with Client(address) as client:
        found = sorted(client.pods(), key=lambda p: -p.created_at)
        if quiet:
            for pod in found:
                click.echo(pod.id)
            return
        rows = []
        for pod in found:
            request = api.PodSandboxStatusRequest(pod_sandbox_id=pod.id)
            status = client.runtime("PodSandboxStatus", request).status
            containers = client.containers(pod_sandbox_id=pod.id)
            running = sum(c.state == api.CONTAINER_RUNNING for c in containers)
            rows.append(
                (
                    pod.id[:SHORT],
                    pod.metadata.namespace,
                    pod.metadata.name,
                    POD_STATES.get(pod.state, "?"),
                    status.network.ip or "-",
                    f"{running}/{len(containers)}",
                    age(pod.created_at),
                )
            )
        click.echo(table(("POD", "NAMESPACE", "NAME", "STATE", "IP", "RUNNING", "AGE"), rows))
