"""`pyrunc-cri checkpoint`: writes a running container, or the containers of a pod, to archives."""

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


@click.command()
@click.argument("name", metavar="CONTAINER|POD", shell_complete=completion.both)
@click.option(
    "-e",
    "--export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The new file, for a pod the new folder; by default in the current directory, named after "
    "the container or pod and the time.",
)
@click.option(
    "-t",
    "--timeout",
    type=stop.SECONDS,
    default=0,
    metavar="S",
    help="Give up after S seconds; 0: never.",
)
@click.pass_obj
def checkpoint(address: str, name: str, export: Path | None, timeout: int) -> None:
    """Write the processes and files of a running container to an archive. The container is frozen
    meanwhile and then runs on. The server's machine must have criu installed.

    The containers of a pod are frozen at the same moment, and their archives are written into one
    new folder.

    To restore a container, `run` a manifest with `image: /PATH/OF/ARCHIVE`.
    """
    with Client(address) as client:
        target = stop.find(client, name)
        if not target.running:
            raise WrongState(f"{name} is not running")
        place = Path(os.path.abspath(export or default_name(target)))
        if os.path.lexists(place):
            raise AlreadyExists(
                f"{place} exists already; name another file or folder with --export"
            )
        if target.is_pod:
            _pod(client, target, place, timeout)
        else:
            request = api.CheckpointContainerRequest(
                container_id=target.id, location=str(place), timeout=timeout
            )
            client.call(request, None)
    click.echo(place)


def default_name(target: stop.Target) -> str:
    """Return the name of a new archive, as kubelet builds it:
    checkpoint-POD_NAMESPACE-CONTAINER-TIME.tar. For a pod return the name of a folder:
    checkpoint-NAME-TIME, where NAME is the pod's name or id as the user wrote it."""
    now = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    if target.is_pod:
        return f"checkpoint-{target.name.replace('/', '_')}-{now}"
    labels = target.labels
    pod_name = labels.get("io.kubernetes.pod.name", "")
    pod = f"{pod_name}_{labels.get('io.kubernetes.pod.namespace', '')}".strip("_")
    return f"checkpoint-{pod + '-' if pod else ''}{target.running[0].metadata.name}-{now}.tar"


def _pod(client: Client, target: stop.Target, place: Path, timeout: int) -> None:
    request = api.CheckpointPodRequest(
        pod_sandbox_id=target.id,
        output_path=str(place),
        container_ids=[c.id for c in target.running],
    )
    with kernel_errors("mkdir", repr(str(place))):
        # The archives hold the memory of processes, secrets included.
        place.mkdir(mode=0o700)
    try:
        client.call(request, timeout or None)
    except BaseException:
        place.rmdir()
        raise
