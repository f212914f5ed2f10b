"""Makes placeholder mounts: empty files and folders at the paths where other engines mount
something into every container. CRIU restores the checkpoints of these engines only if something is
mounted at the same paths.

CRI-O and podman mount an empty file at /run/.containerenv, and a folder at /run/secrets if the
node's mounts.conf says so. Placeholders lie beside the writable layer and are removed with it. If
the request mounts something at such a path, no placeholder is made. Source: CRI-O
internal/lib/checkpoint.go, server/container_create_linux.go; containers-mounts.conf(5).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.spec.mounts import MountRequest

FOLDER = "placeholders"
FILE, DIRECTORY = "file", "directory"
PLACES = {"/run/.containerenv": FILE, "/run/secrets": DIRECTORY}


def declared(
    binds: Collection[str], requested: Sequence[MountRequest], root: Path
) -> list[MountRequest]:
    """Return a bind mount of a placeholder for each path in PLACES that is also in `binds` (the
    checkpoint's mounts), unless a `requested` mount has this path. `root`: the container's
    folder."""
    occupied = {mount.destination for mount in requested}
    places = [place for place in PLACES if place in binds and place not in occupied]
    return [
        MountRequest(api.Mount(container_path=place), place, str(root / FOLDER / str(number)))
        for number, place in enumerate(places)
    ]


def make(mounts: Sequence[MountRequest]) -> None:
    """Create the sources of `mounts`: empty files and folders. Blocks. Raises OSError."""
    if not mounts:
        return
    os.mkdir(os.path.dirname(mounts[0].source), 0o700)
    for mount in mounts:
        if PLACES[mount.destination] == DIRECTORY:
            os.mkdir(mount.source, 0o755)
        else:
            os.close(
                os.open(mount.source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            )
