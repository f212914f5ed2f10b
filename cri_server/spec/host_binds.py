"""Which binds of a container's specification have paths of the host as sources that are not the
server's own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyrunc import atomic_file
from pyrunc.compile.rootfs_probe import may_be_made_inside
from pyrunc.plan.mounts import is_bind, is_remount
from pyrunc.shim.files import LaunchFile, Place
from pyrunc.spec.model import Spec
from pyrunc.spec.parse import parse

CONFIG = "config.json"
LOCAL = ("/sys", "/dev/shm")  # the kernel's own, among the mounts that the server makes up


@dataclass(frozen=True, slots=True)
class HostBind:
    """A bind of a host path. `links`: its path may have some, for the server has not looked it up;
    `made_inside`: the container's process makes it, if its source is in every mount namespace."""

    source: str
    destination: str
    links: bool
    made_inside: bool


def read(folder: Path, own: tuple[str, ...]) -> list[HostBind]:
    """As `of`, by the files in the container's folder. Raises NotFound, DamagedRecord, InvalidSpec."""
    return of(atomic_file.read_json(f"{folder}/{CONFIG}"), LaunchFile.read(folder), own)


def of(spec: dict[str, Any], launch_file: LaunchFile, own: tuple[str, ...]) -> list[HostBind]:
    """The binds of an OCI configuration whose sources are paths of others. Not the server's own
    files, which are in the folders `own`. Raises InvalidSpec."""
    if launch_file.runtime or launch_file.restore:
        # The shim attaches clones; what else is in the configuration, the other runtime or CRIU
        # opens.
        return [
            HostBind(place.source, _destination(spec, place), links=False, made_inside=False)
            for place in launch_file.places
            if place.source
        ]
    settled = set(launch_file.settled)
    model = _binds_only(
        spec, [m for m in spec["mounts"] if _is_of_others(m.get("source", ""), settled, own)]
    )
    return [
        HostBind(
            mount.source,
            mount.destination,
            mount.source not in settled,
            may_be_made_inside(mount, model),
        )
        for mount in model.mounts
        if is_bind(mount) and not is_remount(mount)
    ]


def _destination(spec: dict[str, Any], place: Place) -> str:
    mounts = (m for m in spec["mounts"] if m.get("source", "").endswith(f"/{place.place}"))
    return str(next(mounts)["destination"])


def _binds_only(spec: dict[str, Any], mounts: list[dict[str, Any]]) -> Spec:
    """As much of the specification as says who makes these mounts: all of it takes ten times as
    long."""
    linux = {
        key: spec["linux"][key]
        for key in ("namespaces", "rootfsPropagation")
        if key in spec["linux"]
    }
    hooks = {key: found for key, found in spec.get("hooks", {}).items() if key == "createContainer"}
    return parse(
        {"ociVersion": spec["ociVersion"], "mounts": mounts, "linux": linux, "hooks": hooks}
    )


def _is_of_others(source: str, settled: Collection[str], own: tuple[str, ...]) -> bool:
    if source in settled:
        return True
    return (
        source.startswith("/")
        and source not in LOCAL
        and not any(source.startswith(f"{folder}/") for folder in own)
    )
