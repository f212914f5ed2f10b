"""`pyrunc-cri restart`: a container ends and another attempt of it starts, as kubelet does; the one before is kept for `logs -p`.

CRI does not tell what a container was made from, so this needs our server. What kubelet made is only stopped: kubelet starts it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import completion, ownership, sources, stop
from cri_server.cli.client import Client, ServerError
from cri_server.cli.complaint import each


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="CONTAINER|POD...", shell_complete=completion.both)
@stop.time_option(stop.GRACE_S)
@click.option("-f", "--force", is_flag=True, help="Do not ask about kubelet's.")
@click.pass_obj
def restart(address: str, names: tuple[str, ...], grace_s: int, force: bool) -> None:
    """Restart containers, or all containers of pods that run."""
    with Client(address) as client:
        each(names, lambda name: _restart(client, name, grace_s, force))


def _restart(client: Client, name: str, grace_s: int, force: bool) -> None:
    target = stop.find(client, name)
    ownership.permit("restart", name, target.labels, force=force)
    containers = target.running if target.is_pod else [client.container(target.id)]
    kubelets = ownership.owner(target.labels) == "kubelet"
    for container in containers:
        if kubelets:
            stop.stop_container(client, container.id, grace_s)
        else:
            again(client, container, grace_s)
    click.echo(name)


def again(client: Client, container: api.Container, grace_s: int) -> str:
    """Stop it and start its next attempt; the new id. Raises ServerError."""
    config, sandbox = client.container_config(container.id)
    plain = sources.without_links(client, container.id, config)
    others = _attempts(client, container)
    stop.stop_container(client, container.id, grace_s)
    config.metadata.attempt = max(c.metadata.attempt for c in others) + 1
    config.log_path = next_log(config.log_path, config.metadata.attempt)
    request = api.CreateContainerRequest(
        pod_sandbox_id=container.pod_sandbox_id, config=config, sandbox_config=sandbox
    )
    made = str(client.runtime("CreateContainer", request).container_id)
    try:
        sources.check(client, made, config, plain)
    except ServerError:
        client.runtime("RemoveContainer", api.RemoveContainerRequest(container_id=made))
        raise
    client.runtime("StartContainer", api.StartContainerRequest(container_id=made))
    for each_one in others:
        if each_one.id != container.id and each_one.state != api.CONTAINER_RUNNING:
            client.runtime("RemoveContainer", api.RemoveContainerRequest(container_id=each_one.id))
    return made


def _attempts(client: Client, container: api.Container) -> Sequence[api.Container]:
    found = client.containers(pod_sandbox_id=container.pod_sandbox_id)
    return [c for c in found if c.metadata.name == container.metadata.name]


def next_log(path: str, attempt: int) -> str:
    """kubelet's `NAME/0.log` and our `NAME.log`, `NAME.1.log` with the number of the attempt."""
    folder, name = posixpath.split(path)
    stem = re.sub(r"(^|\.)\d+\.log$|\.log$", "", name)
    return posixpath.join(folder, f"{stem}.{attempt}.log" if stem else f"{attempt}.log")
