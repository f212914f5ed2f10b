"""`pyrunc-cri checkpoint`: a running container, or a pod's containers, as archives that can be
restored; they go on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.containers import stop
from pyrunc.errors import AlreadyExists, WrongState, kernel_errors

SECONDS = click.IntRange(0, (1 << 31) - 1)


@click.command()
@click.argument("name", metavar="CONTAINER|POD", shell_complete=completion.both)
@click.option(
    "-e",
    "--export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to: a new file, for a pod a new folder. By default one in this folder, named after container or pod and time.",
)
@click.option(
    "-t",
    "--timeout",
    type=SECONDS,
    default=0,
    metavar="S",
    help="Give up after these seconds; 0: never.",
)
@click.pass_obj
def checkpoint(address: str, name: str, export: Path | None, timeout: int) -> None:
    """Write what a container's processes and files are to an archive, by CRIU; it goes on. All
    containers of a pod stand still together, and become a folder.

    `image: /PATH/OF/ARCHIVE` in a manifest for `run` goes on where the container was.
    """
    with Client(address) as client:
        target = stop.find(client, name)
        if not target.running:
            raise WrongState(f"{name} does not run")
        place = Path(os.path.abspath(export or default_name(target)))
        if os.path.lexists(place):
            raise AlreadyExists(f"{place} exists")
        if target.is_pod:
            _pod(client, target, place, timeout)
        else:
            request = api.CheckpointContainerRequest(
                container_id=target.id, location=str(place), timeout=timeout
            )
            client.runtime("CheckpointContainer", request, None)
    click.echo(place)


def default_name(target: stop.Target) -> str:
    """As kubelet names archives: checkpoint-POD_NAMESPACE-CONTAINER-TIME.tar."""
    now = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    if target.is_pod:
        return f"checkpoint-{target.name.replace('/', '_')}-{now}"
    labels = target.labels
    pod = f"{labels.get('io.kubernetes.pod.name', '')}_{labels.get('io.kubernetes.pod.namespace', '')}".strip(
        "_"
    )
    return f"checkpoint-{pod + '-' if pod else ''}{target.running[0].metadata.name}-{now}.tar"


def _pod(client: Client, target: stop.Target, place: Path, timeout: int) -> None:
    request = api.CheckpointPodRequest(
        pod_sandbox_id=target.id,
        output_path=str(place),
        container_ids=[c.id for c in target.running],
    )
    with kernel_errors("mkdir", repr(str(place))):
        place.mkdir(mode=0o700)
    try:
        client.runtime("CheckpointPod", request, timeout or None)
    except BaseException:
        place.rmdir()
        raise
