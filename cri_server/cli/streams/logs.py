"""`pyrunc-cri logs`: prints a container's log without the CRI prefix: its stdout to stdout, its
stderr to stderr."""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.streams.log_lines import Filter, Log, LogEntry, moment
from pyrunc.errors import InvalidArgument, NotFound

# CRI reports no new log lines, so the files are read again and again.
POLL_S = 0.1
container_option = click.option(
    *("-c", "--container", "container_of_pod"),
    default="",
    metavar="NAME",
    help="CONTAINER is a pod, and NAME its container.",
)


@dataclass(slots=True)
class Writer:
    """Writes log entries to stdout and stderr. Each line can begin with the container's name, and
    with the time (`timestamps`)."""

    timestamps: bool = False
    filter: Filter = field(default_factory=Filter)
    _within: set[tuple[str, str]] = field(default_factory=set)  # streams within a partial line

    @property
    def full(self) -> bool:
        """True once --limit-bytes is reached."""
        return self.filter.limit_bytes == 0

    def write(self, entry: LogEntry, name: str = "") -> None:
        """Write an entry if the filter selects it. Raises OSError."""
        if not self.filter.passes(entry):
            return
        key, prefix = (name, entry.stream), b""
        if key not in self._within:
            prefix = (name.encode() + b" " if name else b"") + (
                entry.time + b" " if self.timestamps else b""
            )
        target = sys.stderr.buffer if entry.stream == "stderr" else sys.stdout.buffer
        target.write(self.filter.cut(prefix + entry.content))
        target.flush()
        (self._within.discard if entry.content.endswith(b"\n") else self._within.add)(key)


@click.command()
@click.argument("name", metavar="CONTAINER|POD", shell_complete=completion.both)
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Continue until the container has exited."
)
@click.option("-p", "--previous", is_flag=True, help="Show the log of the previous attempt.")
@container_option
@click.option("--tail", default="all", metavar="N", help="Only the last N lines. [all]")
@click.option("--since", metavar="TIME", help="Only newer lines: 42m, or 2026-11-22T10:00:00Z.")
@click.option("--until", metavar="TIME", help="Only older lines.")
@click.option("-t", "--timestamps", is_flag=True, help="Print the time of each line.")
@click.option("-s", "--stream", type=click.Choice(["stdout", "stderr"]), help="Only this stream.")
@click.option("--limit-bytes", type=click.IntRange(0), metavar="N", help="At most N bytes.")
@click.option(
    "-r", "--reopen", is_flag=True, help="Have the server reopen the log file; show nothing."
)
@click.option(
    "-a",
    "--all-containers",
    is_flag=True,
    help="Show all containers of a pod, with the name before each line.",
)
@click.pass_obj
def logs(
    address: str,
    name: str,
    following: bool,
    previous: bool,
    container_of_pod: str,
    tail: str,
    since: str | None,
    until: str | None,
    timestamps: bool,
    stream: str | None,
    limit_bytes: int | None,
    reopen: bool,
    all_containers: bool,
) -> None:
    """Show the log of a container.

    The argument is a container's id, NAME, POD/NAME or NAMESPACE/POD/NAME, or the name of a pod
    with one container. For other pods, choose with --container or --all-containers.
    """
    lines = _tail(tail)
    now = datetime.datetime.now(datetime.UTC)
    begin, end = (moment(text, now) if text else None for text in (since, until))
    writer = Writer(timestamps, Filter(begin, end, stream or "", limit_bytes))
    with Client(address) as client:
        chosen = (
            _all_of(client, name)
            if all_containers
            else [client.container(f"{name}/{container_of_pod}" if container_of_pod else name)]
        )
        if previous:
            chosen = [_previous(client, each) for each in chosen]
        if reopen:
            for each in chosen:
                client.call(api.ReopenContainerLogRequest(container_id=each.id))
            return
        names = {c.id: c.metadata.name if all_containers else "" for c in chosen}
        show(client, names, writer, tail=lines, following=following)


def _tail(text: str) -> int:
    """Parse --tail: a number of lines, or `all`, which becomes -1. Raises InvalidArgument."""
    if text in ("all", "-1"):
        return -1
    if not re.fullmatch("[0-9]{1,18}", text):
        raise InvalidArgument(f"--tail {text}: expected a number of lines, or all")
    return int(text)


def _all_of(client: Client, name: str) -> Sequence[api.Container]:
    pod = client.pod(name)
    containers = client.containers(pod_sandbox_id=pod.id)
    if not containers:
        raise NotFound(f"pod {name!r} has no containers")
    return sorted(containers, key=lambda c: c.created_at)


def _previous(client: Client, container: api.Container) -> api.Container:
    """Return the previous attempt of a container. Raises NotFound."""
    metadata = container.metadata
    earlier = [
        c
        for c in client.containers(pod_sandbox_id=container.pod_sandbox_id)
        if c.metadata.name == metadata.name and c.metadata.attempt < metadata.attempt
    ]
    if not earlier:
        raise NotFound(
            f"container {metadata.name!r} has no previous attempt"
            f" (this is attempt {metadata.attempt})"
        )
    return max(earlier, key=lambda c: c.metadata.attempt)


def show(
    client: Client,
    names: dict[str, str],
    writer: Writer,
    *,
    tail: int = -1,
    following: bool = False,
    sidecars: Collection[str] = (),
) -> None:
    """Print the logs of containers. `names`: for each container id, the prefix of its lines. With
    `following`, continue until all containers except `sidecars` have exited. Raises NotFound,
    OSError."""
    with contextlib.ExitStack() as stack:
        pending: dict[str, Log] = {}
        for identifier in names:
            log = pending[identifier] = Log(log_path(client, identifier))
            stack.callback(log.close)
            if tail >= 0:
                log.seek_last(tail)
        while pending.keys() - set(sidecars):
            for identifier, log in list(pending.items()):
                state = client.container_status(identifier).status.state
                over = not following or state == api.CONTAINER_EXITED
                for entry in log.new():
                    writer.write(entry, names[identifier])
                    if writer.full:
                        return
                if over:
                    del pending[identifier]
            if pending.keys() - set(sidecars):
                time.sleep(POLL_S)


def log_path(client: Client, identifier: str) -> str:
    """Return the path of a container's log. Raises NotFound if it has none."""
    path = client.container_status(identifier).status.log_path
    if not path:
        raise NotFound(f"container {identifier} has no log")
    return path
