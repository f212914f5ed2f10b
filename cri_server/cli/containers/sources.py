"""Where the mounts of a container come from, as the server found it.

A host path of a subPath was resolved beneath its volume and had no link in it. A container that has
the volume may put one there, which the server follows when it looks the path up. What it found it
keeps: it follows none when it mounts (CVE-2021-25741).
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client, ServerError
from cri_server.cli.output import show


def real_sources(client: Client, container: str) -> dict[str, str]:
    """The real source of each mount by its place in the container; nothing when the server does not
    tell."""
    mounts = show.container_info(client, container).get("runtimeSpec", {}).get("mounts", ())
    return {mount["destination"]: mount.get("source", "") for mount in mounts}


def without_links(client: Client, container: str, config: api.ContainerConfig) -> list[str]:
    """The places of mounts whose host paths had no link in them when `container` was made of
    `config`, and may have none now."""
    found = real_sources(client, container)
    return [
        m.container_path for m in config.mounts if m.host_path and _found(found, m) == m.host_path
    ]


def check(
    client: Client, container: str, config: api.ContainerConfig, places: Collection[str]
) -> None:
    """Raises ServerError when the server, which has made `container` of `config`, came over a link
    to the source of one of the `places`."""
    if not places:
        return
    found = real_sources(client, container)
    for mount in config.mounts:
        if mount.container_path in places and _found(found, mount) != mount.host_path:
            raise ServerError(
                f"container {config.metadata.name}: {mount.host_path}, for {mount.container_path}, was replaced by a link meanwhile"
            )


def _found(found: dict[str, str], mount: api.Mount) -> str:
    return found.get(posixpath.normpath(mount.container_path), "")
