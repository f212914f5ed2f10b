"""Prepares a spec for an external OCI runtime or CRIU. Both take mount sources as paths, where
pyrunc takes descriptors.

So the shim makes a private mount namespace, which the host does not see, and attaches the
container's mounts and the request's host paths to mount points in it. The runtime or CRIU runs in
this namespace. Otherwise it would open the host paths itself, and would follow a symlink that
replaced a component after the server's check (CVE-2021-25741).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from cri_server.spec.mounts import OUR_MOUNTS, POD_SHM, MountRequest
from pyrunc.shim.files import PreparedMount

ROOT, MOUNTS = "rootfs", "mounts"
OCI_VERSION = "1.0.2"  # all runtimes accept it; crun 1.8 refuses 1.1 and later


def bundle(
    spec: dict[str, Any], requested: Iterable[MountRequest], folder: str
) -> tuple[dict[str, Any], list[PreparedMount]]:
    """Change the spec for an external runtime as `with_paths` does, and set an `ociVersion` that
    all runtimes accept. Return the changed spec and the mounts that the shim must attach.

    `requested`: the mounts of the CRI request. Raises OSError.
    """
    changed, places = with_paths(spec, requested, folder)
    return {**changed, "ociVersion": OCI_VERSION}, places


def with_paths(
    spec: dict[str, Any], requested: Iterable[MountRequest], folder: str
) -> tuple[dict[str, Any], list[PreparedMount]]:
    """Find the mounts that the shim must attach, and set the source of each to a mount point in
    `folder`. Return the changed spec and these mounts.

    Creates the mount points, except those for host paths: such a path may be a file or a folder, so
    the shim creates the mount point when it opens the path.

    `requested`: the mounts of the CRI request. Raises OSError.
    """
    requests = {request.source: request for request in requested}
    mounts: list[dict[str, Any]] = []
    places: list[PreparedMount] = []
    for number, mount in enumerate(spec["mounts"]):
        place = f"{MOUNTS}/{number}"
        content = _content(mount, place, requests)
        if content is not None:
            places.append(content)
        mounts.append(mount if content is None else {**mount, "source": f"{folder}/{place}"})
    # Whether a host path is a file or a folder is left to the shim's compiler: its storage may not
    # answer.
    for place in (ROOT, MOUNTS, *(place.place for place in places if not place.source)):
        os.makedirs(f"{folder}/{place}", mode=0o700, exist_ok=True)
    return {**spec, "mounts": mounts}, places


def _content(
    mount: dict[str, Any], place: str, requests: Mapping[str, MountRequest]
) -> PreparedMount | None:
    """Return the instruction for the shim to attach the source of `mount` to the mount point
    `place`. Return None if the runtime can open the mount's source itself."""
    source = mount.get("source", "")
    if source == POD_SHM:
        return PreparedMount(place, pinned=source.removeprefix(OUR_MOUNTS))
    request = requests.get(source)
    if request is not None and request.image is not None:
        return PreparedMount(place, image=request.image)
    if request is not None and request.layers:
        return PreparedMount(place, lower=request.layers)
    if request is not None and request.request.host_path:
        return PreparedMount(place, source=source)
    return None
