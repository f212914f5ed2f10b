"""`pyrunc-cri serve`: every flag has a key in the configuration file and wins over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyrunc.errors import Error

if TYPE_CHECKING:
    from cri_server.config.loader import Loaded

FLAGS = {
    "listen": "server.listen",
    "root": "server.root",
    "state": "server.state",
    "log_level": "server.log_level",
    "log_format": "server.log_format",
    "cni_conf_dir": "network.conf_dir",
    "cni_bin_dir": "network.bin_dir",
    "cgroup_driver": "cgroup.driver",
    "container_rlimit": "containers.rlimits",
}
_OPTIONS = (
    click.option(
        "--config",
        type=click.Path(path_type=Path, readable=False),
        help="TOML file, with its drop-ins in FILE.d [/etc/pyrunc/config.toml]",
    ),
    click.option("--listen", metavar="unix:///PATH", help="Where to listen."),
    click.option("--root", metavar="DIR", help="Images and records (a disk)."),
    click.option("--state", metavar="DIR", help="Sockets and facts of this boot (a tmpfs)."),
    click.option("--cni-conf-dir", metavar="DIR"),
    click.option("--cni-bin-dir", metavar="DIR"),
    click.option("--cgroup-driver", type=click.Choice(["auto", "systemd", "cgroupfs"])),
    click.option(
        "--container-rlimit",
        metavar="NAME=SOFT[:HARD]",
        multiple=True,
        help="Of each container; may be repeated.",
    ),
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"])),
    click.option("--log-format", type=click.Choice(["text", "json", "journald"])),
)


def settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that reads the configuration as a server does."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@settings
def serve(config: Path | None, **flags: Any) -> None:
    """Run the CRI server that kubelet connects to. SIGHUP makes it read its configuration again."""
    from cri_server import app

    found = read(config, flags).config
    require_root()
    app.serve(found, lambda: read(config, flags).config)


def read(config: Path | None, flags: dict[str, Any]) -> Loaded:
    """What the file, its drop-ins and the flags say. Raises InvalidSpec, also for what this machine
    does not permit."""
    from cri_server.config import load_with_origins
    from cri_server.node import check

    overrides = {FLAGS[name]: _key(value) for name, value in flags.items()}
    return load_with_origins(config, overrides, check.check)


def require_root() -> None:
    """Raises Error: what a server does (mounts, namespaces, networks of the host) is root's."""
    if os.geteuid() != 0:
        raise Error(f"the server needs root, this is user {os.geteuid()}")


def _key(value: Any) -> Any:
    """A flag that may be repeated as its key's list; None when it was not given."""
    return (list(value) or None) if isinstance(value, tuple) else value
