"""`pyrunc-cri logs`: a container's log without the CRI prefix, its two streams on ours."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
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
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the container has exited.")
@click.pass_obj
def logs(address: str, container: str, following: bool) -> None:
    """Show the log of CONTAINER (an id, a name, POD/NAME, or a pod's name)."""
    with Client(address) as client:
        identifier = client.container(container).id
        if following:
            follow(client, [identifier])
            return
        with contextlib.closing(Log(log_path(client, identifier))) as log:
            log.show()


def status(client: Client, identifier: str) -> api.ContainerStatus:
    """The container's status."""
    found: api.ContainerStatus = client.runtime(
        "ContainerStatus", api.ContainerStatusRequest(container_id=identifier)
    ).status
    return found


class Log:
    """A container's log file, read to its present end each time; when it was rotated, on to the new one."""

    def __init__(self, path: str) -> None:
        """Raises NotFound, OSError."""
        self._path = path
        try:
            self._file: BinaryIO = open(path, "rb")
        except FileNotFoundError:
            raise NotFound(f"no log at {path}: the container was not started") from None

    def close(self) -> None:
        self._file.close()

    def show(self) -> None:
        """Write what is new to our stdout and stderr. Raises OSError."""
        while True:
            rotated = self._open_next()
            for stream, content in entries(self._file):
                write(stream, content)
            if rotated is None:
                return
            self._file.close()
            self._file = rotated

    def _open_next(self) -> BinaryIO | None:
        """The file that has taken our file's place. The writer has left ours by then, but for its last lines."""
        try:
            found = open(self._path, "rb")
        except FileNotFoundError:
            return None
        if os.path.sameopenfile(found.fileno(), self._file.fileno()):
            found.close()
            return None
        return found


def follow(client: Client, identifiers: Iterable[str]) -> None:
    """Show what these containers have written and write, until all have exited. Raises NotFound, OSError."""
    with contextlib.ExitStack() as stack:
        pending: dict[str, Log] = {}
        for identifier in identifiers:
            pending[identifier] = Log(log_path(client, identifier))
            stack.callback(pending[identifier].close)
        while True:
            for identifier, log in list(pending.items()):
                over = status(client, identifier).state == api.CONTAINER_EXITED
                log.show()
                if over:
                    del pending[identifier]
            if not pending:
                return
            time.sleep(POLL_S)


def log_path(client: Client, identifier: str) -> str:
    """Where the container's log is. Raises NotFound when it has none."""
    path = status(client, identifier).log_path
    if not path:
        raise NotFound(f"container {identifier} has no log")
    return path
