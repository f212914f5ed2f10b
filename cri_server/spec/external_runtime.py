"""A bundle for an OCI runtime that is not ours, or for CRIU: what our own runtime gets as descriptors has a path there.

The shim attaches these mounts in a mount namespace of its own in which it runs the other program, so the host has none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from cri_server.spec.mounts import OUR_MOUNTS, POD_SHM, Asked, bind
from pyrunc.compile.image_mount import Image
from pyrunc.compiler.files import Place

ROOT, MOUNTS = "rootfs", "mounts"
OCI_VERSION = "1.0.2"  # all accept it; crun 1.8 refuses 1.1 and later
OVERLAY_LAYER = "lowerdir+="


def bundle(spec: dict[str, Any], wanted: Iterable[Asked], folder: str) -> tuple[dict[str, Any], list[Place]]:
    """As `with_paths`, in a version of the specification that all runtimes accept. Raises OSError."""
    changed, places = with_paths(spec, wanted, folder)
    return {**changed, "ociVersion": OCI_VERSION}, places


def with_paths(
    spec: dict[str, Any], wanted: Iterable[Asked], folder: str
) -> tuple[dict[str, Any], list[Place]]:
    """The specification with paths in `folder`, whose directories are made, and what is attached there. Raises OSError."""
    images = {asked.source: asked.image for asked in wanted if asked.image is not None}
    mounts: list[dict[str, Any]] = []
    places: list[Place] = []
    for number, mount in enumerate(spec["mounts"]):
        place = f"{MOUNTS}/{number}"
        content = _content(mount, place, images)
        if content is not None:
            places.append(content)
            options = [o for o in mount["options"] if not o.startswith(OVERLAY_LAYER)]
            kind = [] if "bind" in options else ["bind", "rprivate"]
            mount = bind(f"{folder}/{place}", mount["destination"], [*kind, *options])
        mounts.append(mount)
    for place in (ROOT, *(each.place for each in places)):
        os.makedirs(f"{folder}/{place}", mode=0o700, exist_ok=True)
    return {**spec, "mounts": mounts}, places


def _content(mount: dict[str, Any], place: str, images: Mapping[str, Image]) -> Place | None:
    """What is to be attached where the mount's source is; None for a source that is a path, or none."""
    source = mount.get("source", "")
    if source == POD_SHM:
        return Place(place, pinned=source.removeprefix(OUR_MOUNTS))
    if source in images:
        return Place(place, image=images[source])
    if mount.get("type") == "overlay":
        layers = [o.removeprefix(OVERLAY_LAYER) for o in mount["options"] if o.startswith(OVERLAY_LAYER)]
        return Place(place, lower=layers)
    return None
