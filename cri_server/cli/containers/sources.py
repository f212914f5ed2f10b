"""Checks that no host path of a mount has become a symbolic link since a container was created.

A container can replace a path in its volume by a symbolic link. If that path is mounted by subPath,
the server would follow the link when it creates the container's next attempt (CVE-2021-25741).
The server reports the mounted path with all links resolved. These functions compare it with the
requested host path.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client, ServerError


def real_sources(client: Client, container: str) -> dict[str, str]:
    """Return {destination: source path that the server has mounted} for the mounts of a container.
    Empty if the server does not report mounts."""
    mounts = client.container_info(container).get("runtimeSpec", {}).get("mounts", ())
    return {mount["destination"]: mount.get("source", "") for mount in mounts}


def paths_without_links(client: Client, container: str, config: api.ContainerConfig) -> list[str]:
    """Return the destinations of the mounts in `config` whose host paths contained no symbolic link
    when `container` was created. Pass them to `check` for the container's next attempt."""
    sources_by_path = real_sources(client, container)
    return [
        m.container_path
        for m in config.mounts
        if m.host_path and _source_of(m, sources_by_path) == m.host_path
    ]


def check(
    client: Client, container: str, config: api.ContainerConfig, destinations: Collection[str]
) -> None:
    """Raise ServerError if the server followed a symbolic link in the host path of a mount of
    `container`. `destinations`: the container paths of the mounts to check."""
    if not destinations:
        return
    sources_by_path = real_sources(client, container)
    for mount in config.mounts:
        if (
            mount.container_path in destinations
            and _source_of(mount, sources_by_path) != mount.host_path
        ):
            raise ServerError(
                f"container {config.metadata.name}: {mount.host_path}, the source of"
                f" {mount.container_path}, was replaced by a symbolic link"
            )


def _source_of(mount: api.Mount, sources_by_path: dict[str, str]) -> str:
    return sources_by_path.get(posixpath.normpath(mount.container_path), "")
