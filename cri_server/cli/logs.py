"""`pyrunc-cri logs`: a container's log without the CRI prefix, its two streams on ours."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.client import Client
from pyrunc.errors import NotFound

POLL_S = 0.1


def entries(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """(stream, content) of each complete record from the file's position on; content ends with a newline unless partial."""
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(position)
            return
        fields = line[:-1].split(b" ", 3)
        if len(fields) == 4:
            partial = fields[2].split(b":")[0] == b"P"
            yield fields[1].decode("ascii", "replace"), fields[3] + (b"" if partial else b"\n")


def write(stream: str, content: bytes) -> None:
    """To our stdout or stderr."""
    target = sys.stderr.buffer if stream == "stderr" else sys.stdout.buffer
    target.write(content)
    target.flush()


@click.command()
@click.argument("container")
@click.option("-f", "--follow", is_flag=True, help="Go on until the container has exited.")
@click.pass_obj
def logs(address: str, container: str, follow: bool) -> None:
    """Show the log of CONTAINER (an id, a name, POD/NAME, or a pod's name)."""
    with Client(address) as client:
        identifier = client.container(container).id
        path = status(client, identifier).log_path
        if not path:
            raise NotFound(f"container {identifier} has no log")
        follow_file(client, identifier, Path(path), follow=follow)


def status(client: Client, identifier: str) -> api.ContainerStatus:
    """The container's status."""
    found: api.ContainerStatus = client.runtime(
        "ContainerStatus", api.ContainerStatusRequest(container_id=identifier)
    ).status
    return found


def follow_file(client: Client, identifier: str, path: Path, *, follow: bool) -> None:
    """Show what is there, and with `follow` what comes until the container has exited; a rotated file is followed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise NotFound(f"no log at {path}: the container was not started") from None
    with file:
        while True:
            over = not follow or status(client, identifier).state == api.CONTAINER_EXITED
            for stream, content in entries(file):
                write(stream, content)
            if over:
                return
            time.sleep(POLL_S)
