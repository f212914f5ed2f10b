"""`pyrunc-cri serve`: runs the server. Each flag overrides a key of the configuration file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cri_server.cli.arguments import options
from cri_server.cli.arguments.files import FILE
from pyrunc.errors import Error

if TYPE_CHECKING:
    from cri_server.config.loader import LoadedConfig

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
# the options of a command that reads the server's configuration
settings = options.add(
    click.option(
        "--config",
        type=FILE,
        help="TOML file, with its drop-ins in FILE.d [/etc/pyrunc/config.toml]",
    ),
    click.option("--listen", metavar="unix:///PATH", help="The socket to listen on."),
    click.option("--root", metavar="DIR", help="Images and records, on a disk."),
    click.option("--state", metavar="DIR", help="Sockets and files of this boot, on a tmpfs."),
    click.option("--cni-conf-dir", metavar="DIR", help="Network configurations."),
    click.option("--cni-bin-dir", metavar="DIR", help="Programs of CNI plugins."),
    click.option(
        "--cgroup-driver",
        type=click.Choice(["auto", "systemd", "cgroupfs"]),
        help="Whether systemd or the server itself (cgroupfs) makes cgroups.",
    ),
    click.option(
        "--container-rlimit",
        metavar="NAME=SOFT[:HARD]",
        multiple=True,
        help="A resource limit of each container; may be repeated.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="The lowest level that is logged.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["text", "json", "journald"]),
        help="The format of the log.",
    ),
)


@click.command()
@settings
def serve(config: Path | None, **flags: Any) -> None:
    """Run the CRI server that kubelet connects to. On SIGHUP it reads its configuration again."""
    from cri_server import app

    loaded = read(config, flags).config
    require_root()
    app.serve(loaded, lambda: read(config, flags).config)


def read(config: Path | None, flags: dict[str, Any]) -> LoadedConfig:
    """Read the configuration from file, drop-ins and flags. Raises InvalidSpec, also for values
    that this machine does not support."""
    from cri_server.config import load_with_origins
    from cri_server.node import check

    overrides = {FLAGS[name]: _key(value) for name, value in flags.items()}
    return load_with_origins(config, overrides, check.problems)


def require_root() -> None:
    """Raise Error unless this process runs as root: mounts, namespaces and the host's network need
    it."""
    if os.geteuid() != 0:
        raise Error(f"the server needs root, but this is user {os.geteuid()}")


def _key(value: Any) -> Any:
    """Convert the value of a flag to the value of its configuration key. The tuple of a repeatable
    flag becomes a list; an empty tuple becomes None."""
    return (list(value) or None) if isinstance(value, tuple) else value
