"""`pyrunc-cri serve`: every flag has a key in the configuration file and wins over it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pyrunc.errors import Error

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


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path, readable=False), help="TOML file [/etc/pyrunc/config.toml]"
)
@click.option("--listen", metavar="unix:///PATH", help="Where to listen.")
@click.option("--root", metavar="DIR", help="Images and records (a disk).")
@click.option("--state", metavar="DIR", help="Sockets and facts of this boot (a tmpfs).")
@click.option("--cni-conf-dir", metavar="DIR")
@click.option("--cni-bin-dir", metavar="DIR")
@click.option("--cgroup-driver", type=click.Choice(["auto", "systemd", "cgroupfs"]))
@click.option(
    "--container-rlimit",
    metavar="NAME=SOFT[:HARD]",
    multiple=True,
    help="Of each container; may be repeated.",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", type=click.Choice(["text", "json", "journald"]))
def serve(config: Path | None, **flags: Any) -> None:
    """Run the CRI server that kubelet connects to."""
    from cri_server import app
    from cri_server.config import load

    found = load(config, {FLAGS[name]: _key(value) for name, value in flags.items()})
    require_root()
    app.serve(found)


def require_root() -> None:
    """Raises Error: what a server does (mounts, namespaces, networks of the host) is root's."""
    if os.geteuid() != 0:
        raise Error(f"the server needs root, this is user {os.geteuid()}")


def _key(value: Any) -> Any:
    """A flag that may be repeated as its key's list; None when it was not given."""
    return (list(value) or None) if isinstance(value, tuple) else value
