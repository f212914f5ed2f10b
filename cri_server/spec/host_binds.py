"""Finds the bind mounts in a container's spec whose source is a path of the host outside the
server's own folders."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyrunc import atomic_file
from pyrunc.compile.rootfs_probe import may_be_made_inside
from pyrunc.plan.mounts import is_bind, is_remount
from pyrunc.shim.files import LaunchFile, PreparedMount
from pyrunc.spec.model import Spec
from pyrunc.spec.parse import parse

CONFIG = "config.json"
LOCAL = ("/sys", "/dev/shm")  # sources of default mounts, which cannot hang


@dataclass(frozen=True, slots=True)
class HostBind:
    """A bind mount of a host path into a container.

    - `links`: `source` may contain symlinks, because the server has not resolved it.
    - `made_inside`: the spec permits the container's process to make this mount itself. It does so
      only if `BindSource.is_in_every_namespace` is true as well.
    """

    source: str
    destination: str
    links: bool
    made_inside: bool


def read(folder: Path, own_folders: tuple[str, ...]) -> list[HostBind]:
    """Read a container's config.json (its OCI spec) and launch file in `folder`, and return the
    spec's binds of host paths, as `of` does. Raises InvalidSpec, NotFound for a missing file, and
    DamagedRecord for an unreadable one."""
    return of(atomic_file.read_json(f"{folder}/{CONFIG}"), LaunchFile.read(folder), own_folders)


def of(
    spec: dict[str, Any], launch_file: LaunchFile, own_folders: tuple[str, ...]
) -> list[HostBind]:
    """Return the binds in an OCI spec whose source is a host path outside `own_folders`, the
    server's folders. Raises InvalidSpec."""
    if launch_file.runtime or launch_file.restore:
        # The shim attaches clones of these; the external runtime or CRIU opens all other sources.
        return [
            HostBind(place.source, _destination(spec, place), links=False, made_inside=False)
            for place in launch_file.places
            if place.source
        ]
    resolved = set(launch_file.settled)
    model = _binds_only(
        spec, [m for m in spec["mounts"] if _is_foreign(m.get("source", ""), resolved, own_folders)]
    )
    return [
        HostBind(
            mount.source,
            mount.destination,
            mount.source not in resolved,
            may_be_made_inside(mount, model),
        )
        for mount in model.mounts
        if is_bind(mount) and not is_remount(mount)
    ]


def _destination(spec: dict[str, Any], place: PreparedMount) -> str:
    mounts = (m for m in spec["mounts"] if m.get("source", "").endswith(f"/{place.place}"))
    return str(next(mounts)["destination"])


def _binds_only(spec: dict[str, Any], mounts: list[dict[str, Any]]) -> Spec:
    """Parse `mounts` and the parts of the spec that `may_be_made_inside` reads. Parsing the whole
    spec takes ten times as long."""
    linux = {
        key: spec["linux"][key]
        for key in ("namespaces", "rootfsPropagation")
        if key in spec["linux"]
    }
    hooks = {key: value for key, value in spec.get("hooks", {}).items() if key == "createContainer"}
    return parse(
        {"ociVersion": spec["ociVersion"], "mounts": mounts, "linux": linux, "hooks": hooks}
    )


def _is_foreign(source: str, resolved: Collection[str], own_folders: tuple[str, ...]) -> bool:
    return source in resolved or (
        source.startswith("/")
        and source not in LOCAL
        and not any(source.startswith(f"{folder}/") for folder in own_folders)
    )
