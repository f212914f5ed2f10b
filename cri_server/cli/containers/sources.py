"""The sources of a container's mounts, after the server has resolved them.

The host path of a subPath was resolved below its volume and had no link in it. Later a container
with that volume may put a link there, which the server follows when it resolves the path for the
next attempt. The server mounts what it resolved, without following links (CVE-2021-25741).
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client, ServerError


def real_sources(client: Client, container: str) -> dict[str, str]:
    """Return the source of each mount by its path in the container; nothing if the server does not
    report mounts."""
    mounts = client.container_info(container).get("runtimeSpec", {}).get("mounts", ())
    return {mount["destination"]: mount.get("source", "") for mount in mounts}


def paths_without_links(client: Client, container: str, config: api.ContainerConfig) -> list[str]:
    """Return the container paths of the mounts whose host paths had no link when `container` was
    created. The mounts of its next attempt are checked for the same."""
    sources_by_path = real_sources(client, container)
    return [
        m.container_path
        for m in config.mounts
        if m.host_path and _source_of(m, sources_by_path) == m.host_path
    ]


def check(
    client: Client, container: str, config: api.ContainerConfig, places: Collection[str]
) -> None:
    """Raise ServerError if the server followed a link to the source of one of the mounts at
    `places` when it created `container`."""
    if not places:
        return
    sources_by_path = real_sources(client, container)
    for mount in config.mounts:
        if mount.container_path in places and _source_of(mount, sources_by_path) != mount.host_path:
            raise ServerError(
                f"container {config.metadata.name}: {mount.host_path}, the source of"
                f" {mount.container_path}, has become a link"
            )


def _source_of(mount: api.Mount, sources_by_path: dict[str, str]) -> str:
    return sources_by_path.get(posixpath.normpath(mount.container_path), "")
