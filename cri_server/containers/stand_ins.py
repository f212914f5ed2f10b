"""What other engines mount into every container and kubelet asks nobody for: a checkpoint of theirs
comes back only with something there.

CRI-O and podman have an empty file at /run/.containerenv, and a folder at /run/secrets where the
node's mounts.conf says so. Ours are empty, lie beside the writable layer and go with it. A mount of
the caller at the place is taken instead. Source: CRI-O internal/lib/checkpoint.go,
server/container_create_linux.go; containers-mounts.conf(5).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.spec.mounts import Asked

FOLDER = "stand-ins"
FILE, DIRECTORY = "file", "directory"
PLACES = {"/run/.containerenv": FILE, "/run/secrets": DIRECTORY}


def declared(binds: Collection[str], wanted: Sequence[Asked], root: Path) -> list[Asked]:
    """A bind mount for each such place in `binds` that is not in `wanted`; `root` is the
    container's folder."""
    taken = {mount.destination for mount in wanted}
    places = [place for place in PLACES if place in binds and place not in taken]
    return [
        Asked(api.Mount(container_path=place), place, str(root / FOLDER / str(number)))
        for number, place in enumerate(places)
    ]


def make(mounts: Sequence[Asked]) -> None:
    """Make the sources. Blocking. Raises OSError."""
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
