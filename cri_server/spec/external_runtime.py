"""A bundle for an OCI runtime that is not ours, or for CRIU: what our own runtime gets as
descriptors has a path there.

The shim attaches these mounts in a mount namespace of its own in which it runs the other program,
so the host has none of them. So it does with the caller's host paths: the other program would
follow a link that somebody has put there since (CVE-2021-25741).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from cri_server.spec.mounts import OUR_MOUNTS, POD_SHM, Asked
from pyrunc.shim.files import Place

ROOT, MOUNTS = "rootfs", "mounts"
OCI_VERSION = "1.0.2"  # all accept it; crun 1.8 refuses 1.1 and later


def bundle(
    spec: dict[str, Any], wanted: Iterable[Asked], folder: str
) -> tuple[dict[str, Any], list[Place]]:
    """As `with_paths`, in a version of the specification that all runtimes accept. Raises OSError."""
    changed, places = with_paths(spec, wanted, folder)
    return {**changed, "ociVersion": OCI_VERSION}, places


def with_paths(
    spec: dict[str, Any], wanted: Iterable[Asked], folder: str
) -> tuple[dict[str, Any], list[Place]]:
    """The specification with paths in `folder`, whose directories are made, and what is attached
    there. Raises OSError."""
    by_source = {asked.source: asked for asked in wanted}
    mounts: list[dict[str, Any]] = []
    places: list[Place] = []
    for number, mount in enumerate(spec["mounts"]):
        place = f"{MOUNTS}/{number}"
        content = _content(mount, place, by_source)
        if content is not None:
            places.append(content)
        mounts.append(mount if content is None else {**mount, "source": f"{folder}/{place}"})
    # What is at a source, a file or a folder, is for the compiler to find out: its storage may not
    # answer.
    for place in (ROOT, MOUNTS, *(each.place for each in places if not each.source)):
        os.makedirs(f"{folder}/{place}", mode=0o700, exist_ok=True)
    return {**spec, "mounts": mounts}, places


def _content(mount: dict[str, Any], place: str, by_source: Mapping[str, Asked]) -> Place | None:
    """What is to be attached where the mount's source is; None for a source that is a path, or
    none."""
    source = mount.get("source", "")
    if source == POD_SHM:
        return Place(place, pinned=source.removeprefix(OUR_MOUNTS))
    asked = by_source.get(source)
    if asked is not None and asked.image is not None:
        return Place(place, image=asked.image)
    if asked is not None and asked.layers:
        return Place(place, lower=asked.layers)
    if asked is not None and asked.request.host_path:
        return Place(place, source=source)
    return None
