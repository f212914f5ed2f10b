"""Names cgroups: `cgroupsPath` from the pod's parent and an id, by driver.

cgroupfs: `<parent>/<id>`; systemd: `<slice>:cri-pyrunc:<id>`, the scope `cri-pyrunc-<id>.scope`.
kubelet and cAdvisor recognise the cgroup by the id in its last part. A parent in the other driver's
form is an error: systemd and the server would both write to the tree.
"""

from __future__ import annotations

import posixpath

from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidArgument

SCOPE_PREFIX = "cri-pyrunc"
DEFAULT_PARENT = {"cgroupfs": "/pyrunc", "systemd": "system.slice"}


def parent(requested: str, driver: str, default: str) -> str:
    """The parent cgroup for the request's `cgroup_parent`. Raises InvalidArgument."""
    if driver == "systemd":
        return _slice(requested, default or DEFAULT_PARENT[driver])
    return _path(requested or default or DEFAULT_PARENT[driver])


def path(parent_group: str, identifier: str, driver: str) -> str:
    """The OCI `cgroupsPath` of the sandbox or container with this id."""
    if driver == "systemd":
        return f"{parent_group}:{SCOPE_PREFIX}:{identifier}"
    return posixpath.join(parent_group, identifier)


def driver_of(name: str) -> str:
    """The driver of a parent or `cgroupsPath`; after a change of the configuration it differs from
    the server's."""
    return "cgroupfs" if name.startswith("/") else "systemd"


def place(cgroups_path: str, identifier: str) -> Cgroup:
    """The cgroup of a sandbox's pause process or of a container."""
    return naming.place(cgroups_path, identifier, driver_of(cgroups_path))


def _slice(requested: str, default: str) -> str:
    if requested in ("", "/"):
        return default
    # kubelet passes the path of all slices; the name of the last one implies the others
    # (systemd.slice(5)).
    name = requested.rstrip("/").rpartition("/")[2]
    if not name.endswith(".slice"):
        raise InvalidArgument(
            f"cgroup_parent {requested!r} is not a slice, but the cgroup driver is systemd"
        )
    # A colon would be a separator of `cgroupsPath`.
    if "\0" in requested or ":" in requested:
        raise InvalidArgument(f"cgroup_parent {requested!r} is not a slice's name")
    return name


def _path(requested: str) -> str:
    if not requested.startswith("/"):
        raise InvalidArgument(f"cgroup_parent {requested!r} is not an absolute path")
    if ".." in requested.split("/") or "\0" in requested:
        raise InvalidArgument(f"cgroup_parent {requested!r} is not a plain path")
    if requested.rstrip("/").endswith(".slice"):
        raise InvalidArgument(
            f"cgroup_parent {requested!r} is a slice, but the cgroup driver is cgroupfs"
        )
    return posixpath.normpath("/" + requested.lstrip("/"))
