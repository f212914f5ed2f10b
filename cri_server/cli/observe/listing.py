"""`pyrunc-cri ps` and `pods`: list containers and pods."""

from __future__ import annotations

import functools
import re

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import ownership, selection
from cri_server.cli.arguments.selection import Selection
from cri_server.cli.connection.client import Client, shared_names, shortest_name
from cri_server.cli.output import formats
from cri_server.cli.output.formats import Column, Listing, OutputOptions
from cri_server.cli.output.show import PAUSED, POD_STATES, STATES, age

ID = "(sha256:)?[0-9a-f]{64}|(sha512:)?[0-9a-f]{128}"


@click.command()
@click.option("-a", "--all", "all_states", is_flag=True, help="Also containers that do not run.")
@selection.options("container")
@formats.options()
@formats.watch
@click.pass_obj
def ps(
    address: str,
    all_states: bool,
    selection: Selection,
    output: OutputOptions,
    watching: float | None,
) -> None:
    """List the running containers. With --all, --state, --latest or --last list others, too."""
    with Client(address) as client:
        formats.repeat(
            lambda: output.render_list(
                _containers(client, output), selection.containers(client, all_states=all_states)
            ),
            watching,
        )


def _containers(client: Client, output: OutputOptions) -> Listing[api.Container]:
    pods = {p.id: p for p in client.pods()}
    # CRI has no state for paused containers; this costs one call, and only while a container runs.
    paused = functools.cache(client.paused)
    shared = shared_names(pods.values())

    def pod(container: api.Container) -> str:
        sandbox = pods.get(container.pod_sandbox_id)
        return sandbox.metadata.name if sandbox else output.short(container.pod_sandbox_id)

    def namespace(container: api.Container) -> str:
        pod = pods.get(container.pod_sandbox_id)
        return pod.metadata.namespace if pod else ""

    def name(container: api.Container) -> str:
        return shortest_name(container, pods.get(container.pod_sandbox_id), shared)

    def state(container: api.Container) -> str:
        name = STATES.get(container.state, "?")
        if container.state == api.CONTAINER_RUNNING and container.id in paused():
            return PAUSED
        if container.state != api.CONTAINER_EXITED:
            return name
        # CRI's list of containers has no exit codes.
        return f"{name} ({client.container_status(container.id).status.exit_code})"

    return Listing(
        "containers",
        (
            Column("CONTAINER", lambda c: output.short(c.id)),
            Column("NAMESPACE", namespace, wide=not shared),
            Column("POD", pod),
            Column("NAME", lambda c: c.metadata.name),
            Column("STATE", state),
            Column("AGE", lambda c: age(c.created_at)),
            Column("IMAGE", lambda c: _image(c, output)),
            Column("ATTEMPT", lambda c: str(c.metadata.attempt), wide=True),
            Column("POD ID", lambda c: output.short(c.pod_sandbox_id), wide=True),
            Column("IMAGE ID", lambda c: output.short(c.image_id or c.image_ref), wide=True),
            Column("OWNER", lambda c: ownership.owner(c.labels), wide=True),
        ),
        formats.plain,
        lambda c: c.id,
        name,
    )


def _image(container: api.Container, output: OutputOptions) -> str:
    """Return the name of a container's image as the request spells it. An image id is shortened."""
    name = container.image.user_specified_image or container.image.image
    return output.short(name) if re.fullmatch(ID, name) else name


@click.command()
@selection.options("pod")
@formats.options()
@formats.watch
@click.pass_obj
def pods(address: str, selection: Selection, output: OutputOptions, watching: float | None) -> None:
    """List pods."""
    with Client(address) as client:
        formats.repeat(
            lambda: output.render_list(_pods(client, output), selection.pods(client)), watching
        )


def _pods(client: Client, output: OutputOptions) -> Listing[api.PodSandbox]:
    containers = client.containers()

    def running(pod: api.PodSandbox) -> str:
        own = [c for c in containers if c.pod_sandbox_id == pod.id]
        return f"{sum(c.state == api.CONTAINER_RUNNING for c in own)}/{len(own)}"

    def address(pod: api.PodSandbox) -> str:
        return client.pod_status(pod.id).status.network.ip or "-"

    return Listing(
        "items",
        (
            Column("POD", lambda p: output.short(p.id)),
            Column("NAMESPACE", lambda p: p.metadata.namespace),
            Column("NAME", lambda p: p.metadata.name),
            Column("STATE", lambda p: POD_STATES.get(p.state, "?")),
            Column("IP", address),
            Column("RUNNING", running),
            Column("AGE", lambda p: age(p.created_at)),
            Column("ATTEMPT", lambda p: str(p.metadata.attempt), wide=True),
            Column("UID", lambda p: p.metadata.uid, wide=True),
            Column("RUNTIME", lambda p: p.runtime_handler or "(default)", wide=True),
            Column("OWNER", lambda p: ownership.owner(p.labels), wide=True),
        ),
        formats.plain,
        lambda p: p.id,
        lambda p: f"{p.metadata.namespace}/{p.metadata.name}",
    )
