"""Names cgroups: builds OCI's `cgroupsPath` from the pod's parent cgroup, the id of a sandbox or
container, and the cgroup driver.

With cgroupfs the path is `<parent>/<id>`. With systemd it is `<slice>:cri-pyrunc:<id>`, which
stands for the systemd unit `cri-pyrunc-<id>.scope`. kubelet and cAdvisor find the id in the last
component. A parent in the form of the other driver is refused: systemd and the server would both
write to the parent's cgroups.
"""

from __future__ import annotations

import posixpath

from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidArgument

SCOPE_PREFIX = "cri-pyrunc"
DEFAULT_PARENT = {"cgroupfs": "/pyrunc", "systemd": "system.slice"}


def parent(requested: str, driver: str, default: str) -> str:
    """Return the parent cgroup of a pod: the request's `cgroup_parent` (`requested`), else
    `default`, else the driver's default. Raises InvalidArgument for an invalid name, for a slice
    if `driver` is cgroupfs, and for anything but a slice if `driver` is systemd."""
    if driver == "systemd":
        return _slice(requested, default or DEFAULT_PARENT[driver])
    return _path(requested or default or DEFAULT_PARENT[driver])


def path(parent_group: str, identifier: str, driver: str) -> str:
    """Return the OCI `cgroupsPath` of the sandbox or container with the id `identifier`."""
    if driver == "systemd":
        return f"{parent_group}:{SCOPE_PREFIX}:{identifier}"
    return posixpath.join(parent_group, identifier)


def driver_of(name: str) -> str:
    """Return the cgroup driver (cgroupfs or systemd) that the form of `name` implies. `name`: a
    parent cgroup or a `cgroupsPath`. A pod's driver may differ from the server's, because the
    configuration may have changed since the pod was created."""
    return "cgroupfs" if name.startswith("/") else "systemd"


def place(cgroups_path: str, identifier: str) -> Cgroup:
    """Return the cgroup of a pause process or container from its `cgroupsPath` and id. Does not
    create the cgroup."""
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
        raise InvalidArgument(f"cgroup_parent {requested!r} must have no '..' and no NUL byte")
    if requested.rstrip("/").endswith(".slice"):
        raise InvalidArgument(
            f"cgroup_parent {requested!r} is a slice, but the cgroup driver is cgroupfs"
        )
    return posixpath.normpath("/" + requested.lstrip("/"))
