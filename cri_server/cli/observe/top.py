"""`pyrunc-cri top`: shows the processes of containers. Needs root on the server's machine."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options
from cri_server.cli.connection.client import Client
from cri_server.cli.output import formats, show
from cri_server.cli.output.formats import Column, Listing, OutputOptions
from pyrunc.errors import WrongState
from pyrunc.kernel.fd import read_file

TICKS = os.sysconf("SC_CLK_TCK")  # per second, the unit of CPU times in proc_pid_stat(5)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process of a container. `time_s` is its CPU time in seconds."""

    container: str
    pid: int
    parent: int
    user: str
    state: str
    threads: int
    resident_bytes: int
    time_s: float
    command: str


LISTING: Listing[ProcessUsage] = Listing(
    "processes",
    (
        Column("CONTAINER", lambda p: p.container),
        Column("PID", lambda p: str(p.pid)),
        Column("PPID", lambda p: str(p.parent), wide=True),
        Column("USER", lambda p: p.user),
        Column("S", lambda p: p.state),
        Column("THREADS", lambda p: str(p.threads), wide=True),
        Column("MEM", lambda p: show.size(p.resident_bytes)),
        Column("TIME", lambda p: f"{p.time_s:.2f}s"),
        Column("COMMAND", lambda p: p.command),
    ),
    asdict,
    lambda p: str(p.pid),
    lambda p: f"{p.container}/{p.pid}",
)


@click.command()
@options.names("CONTAINER|POD...", completion.both)
@formats.options()
@formats.watch
@click.pass_obj
def top(
    address: str, names: tuple[str, ...], output: OutputOptions, watching: float | None
) -> None:
    """Show the processes of containers, or of all containers of pods."""
    with Client(address) as client:
        formats.repeat(
            lambda: output.render_list(LISTING, list(_processes(client, names))), watching
        )


def _processes(client: Client, names: tuple[str, ...]) -> Iterator[ProcessUsage]:
    for name in names:
        for identifier, label in _containers(client, name):
            pid = client.container_info(identifier).get("pid", 0)
            if not pid or not Path(f"/proc/{pid}").exists():
                raise WrongState(f"container {label} is not running on this machine")
            yield from of_group(label, pid)


def _containers(client: Client, name: str) -> list[tuple[str, str]]:
    match = client.pod_or_container(name)
    if isinstance(match, api.Container):
        return [(match.id, match.metadata.name)]
    containers = client.containers(pod_sandbox_id=match.id)
    return [(c.id, c.metadata.name) for c in containers if c.state == api.CONTAINER_RUNNING]


def of_group(label: str, init: int) -> Iterator[ProcessUsage]:
    """Yield the processes of a container: all processes in or below the cgroups of the process with
    the pid `init`. `label`: the container's name in the results."""
    # A container with its own pid namespace sees other pids, so this searches the host's /proc.
    groups = _groups(init)
    for entry in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        own = _groups(entry)
        if groups and all(_is_beneath(own.get(key, ""), path) for key, path in groups.items()):
            process = _read(label, entry)
            if process is not None:
                yield process


def _groups(pid: int) -> dict[str, str]:
    """Return {hierarchy number: cgroup path} for a process; empty if the process has ended. Leaves
    out root cgroups, which contain all processes: a container is in the root cgroup of every v1
    controller that it does not use."""
    try:
        lines = os.fsdecode(read_file(f"/proc/{pid}/cgroup")).split("\n")[:-1]
    except OSError:
        return {}
    parts = [line.split(":", 2) for line in lines]
    return {number: path for number, _, path in parts if path != "/"}


def _is_beneath(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")


def _read(label: str, pid: int) -> ProcessUsage | None:
    """Read a process's usage from /proc; None if the process has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        stat = (folder / "stat").read_text(errors="replace")
        command = show.command_line(pid)
        uid = folder.stat().st_uid
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    # proc_pid_stat(5) from its third field on; the second, the command, may contain spaces
    fields = rest.split()
    return ProcessUsage(
        container=label,
        pid=pid,
        parent=int(fields[1]),
        user=_user(uid),
        state=fields[0],
        threads=int(fields[17]),
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        time_s=(int(fields[11]) + int(fields[12])) / TICKS,
        command=command or f"[{name}]",
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
