"""The name of a cgroup: from the pod's parent and our id to `cgroupsPath`, by driver.

cgroupfs: `<parent>/<id>`; systemd: `<slice>:cri-pyrunc:<id>`, the scope `cri-pyrunc-<id>.scope`.
kubelet and cAdvisor find the group by the id in its last part. A parent in the other driver's form
is an error: two tools would fight over the tree.
"""

from __future__ import annotations

import posixpath

from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidArgument

SCOPE_PREFIX = "cri-pyrunc"
DEFAULT_PARENT = {"cgroupfs": "/pyrunc", "systemd": "system.slice"}


def parent(asked: str, driver: str, default: str) -> str:
    """The parent to use for `cgroup_parent` as asked. Raises InvalidArgument."""
    if driver == "systemd":
        return _slice(asked, default or DEFAULT_PARENT[driver])
    return _path(asked or default or DEFAULT_PARENT[driver])


def path(parent_group: str, identifier: str, driver: str) -> str:
    """The OCI `cgroupsPath` of the thing with this id."""
    if driver == "systemd":
        return f"{parent_group}:{SCOPE_PREFIX}:{identifier}"
    return posixpath.join(parent_group, identifier)


def driver_of(name: str) -> str:
    """The driver that a parent or a `cgroupsPath` of ours was made for; after a change of the
    configuration not the server's."""
    return "cgroupfs" if name.startswith("/") else "systemd"


def place(cgroups_path: str, identifier: str) -> Cgroup:
    """The group of a sandbox's pause process or a container."""
    return naming.place(cgroups_path, identifier, driver_of(cgroups_path))


def _slice(asked: str, default: str) -> str:
    if asked in ("", "/"):
        return default
    name = asked.rstrip("/").rpartition("/")[2]
    if not name.endswith(".slice"):
        raise InvalidArgument(
            f"cgroup_parent {asked!r} is not a slice, but the cgroup driver is systemd"
        )
    if "\0" in asked or ":" in asked:
        raise InvalidArgument(f"cgroup_parent {asked!r} is not a slice's name")
    return name


def _path(asked: str) -> str:
    if not asked.startswith("/"):
        raise InvalidArgument(f"cgroup_parent {asked!r} is not an absolute path")
    if ".." in asked.split("/") or "\0" in asked:
        raise InvalidArgument(f"cgroup_parent {asked!r} is not a plain path")
    if asked.rstrip("/").endswith(".slice"):
        raise InvalidArgument(
            f"cgroup_parent {asked!r} is a slice, but the cgroup driver is cgroupfs"
        )
    return posixpath.normpath("/" + asked.lstrip("/"))
