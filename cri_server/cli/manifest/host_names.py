"""A pod's /etc/hosts, with the same content as kubelet's: localhost, the pod's name, its
hostAliases. Each container gets the file as a mount."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.cli.manifest import pod_model

NAME = "etc-hosts"  # in the pod's folder
PLACE = "/etc/hosts"
HEADER = "# Written by pyrunc-cri run.\n"
LOCAL = (
    "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    "fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\n"
    "fe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n"
)


def text(spec: pod_model.PodSpec, hostname: str, addresses: Sequence[str], host_file: str) -> str:
    """Return the content of /etc/hosts for a pod: localhost, `hostname` with `addresses`, and the
    hostAliases. With hostNetwork the content is `host_file` (the content of the host's file) and
    the hostAliases."""
    aliases = [f"{alias.ip}\t{' '.join(alias.hostnames)}" for alias in spec.host_aliases]
    if spec.host_network:
        return host_file + _lines(aliases)
    return _of_pod(hostname, addresses, aliases)


def _of_pod(hostname: str, addresses: Sequence[str], aliases: Sequence[str]) -> str:
    own = [f"{address}\t{hostname}" for address in addresses]
    return HEADER + LOCAL + _lines([*own, *aliases])


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def write(spec: pod_model.PodSpec, hostname: str, addresses: Sequence[str], folder: Path) -> None:
    """Write the pod's /etc/hosts into the pod's folder. Raises OSError."""
    try:
        host_file = Path(PLACE).read_text(errors="replace")
    except FileNotFoundError:
        host_file = ""
    path = folder / NAME
    path.write_text(text(spec, hostname, addresses, host_file))
    path.chmod(0o644)


def renew(folder: Path, hostname: str, addresses: Sequence[str]) -> None:
    """Replace the pod's addresses in its /etc/hosts. Writes the file in place, because running
    containers have mounted it. Raises OSError."""
    path = folder / NAME
    if not path.exists() or not (before := path.read_text()).startswith(HEADER):
        return
    lines = before[len(HEADER + LOCAL) :].splitlines()
    aliases = [line for line in lines if not line.endswith(f"\t{hostname}")]
    # A rename(2) would not reach running containers, which have this inode mounted.
    path.write_text(_of_pod(hostname, addresses, aliases))


def mount(config: api.ContainerConfig, folder: Path) -> None:
    """Add a mount of the pod's /etc/hosts to a container's configuration, unless the manifest has a
    mount at that path."""
    if (folder / NAME).exists() and all(m.container_path != PLACE for m in config.mounts):
        config.mounts.add(container_path=PLACE, host_path=str(folder / NAME))


def replace_addresses(content: str, before: Sequence[str], now: Sequence[str]) -> str:
    """Replace each address of `before` in a text by the address of `now` with the same index."""
    for old, new in zip(before, now, strict=False):
        content = re.sub(rf"(?<![0-9A-Fa-f:.]){re.escape(old)}(?![0-9A-Fa-f:.])", new, content)
    return content
