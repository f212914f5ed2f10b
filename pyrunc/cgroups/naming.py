"""Converts `linux.cgroupsPath`, the container's id and the driver to a `Cgroup`.

cgroupfs: an absolute path begins at the root of the v2 tree. A relative or absent path begins at
the parent of the runtime's own cgroup, because a group with processes cannot enable controllers for
its children.

systemd: the path is `slice:prefix:name`. The result is `prefix-name.scope` below the slice. A slice
`a-b.slice` is below `a.slice` (systemd.slice(5)).
"""

from __future__ import annotations

import os

from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidArgument, InvalidSpec
from pyrunc.kernel import cgroup
from pyrunc.kernel.credential import is_machine_root

PREFIX = "pyrunc"
WHERE = "linux.cgroupsPath"


def place(cgroups_path: str, container_id: str, driver: str) -> Cgroup:
    """Return the container's cgroup, without creating it. Raises InvalidSpec for a path that the
    driver cannot use."""
    if driver == "cgroupfs":
        return Cgroup(_beneath(cgroups_path, container_id), driver)
    if driver == "systemd":
        return _scope(cgroups_path or f":{PREFIX}:{container_id}")
    raise InvalidArgument(f"cgroup driver {driver!r} is not one of cgroupfs, systemd")


def _beneath(cgroups_path: str, container_id: str) -> str:
    if "\0" in cgroups_path:
        raise InvalidSpec(WHERE, "holds a NUL byte")
    if cgroups_path.startswith("/"):
        path = os.path.normpath("/" + cgroups_path.lstrip("/"))
    else:
        base = os.path.dirname(cgroup.own_path() or "/")
        # normpath removes `..` at the beginning of an absolute path, so the group stays beneath
        # `base`.
        path = base.rstrip("/") + os.path.normpath("/" + (cgroups_path or container_id))
    if path == "/":
        raise InvalidSpec(WHERE, f"{cgroups_path!r} is the root of the cgroup tree")
    return path


def _scope(cgroups_path: str) -> Cgroup:
    parts = cgroups_path.split(":")
    if len(parts) != 3:
        raise InvalidSpec(
            WHERE,
            'expected cgroupsPath to be of format "slice:prefix:name" for systemd cgroups,'
            f' got "{cgroups_path}"',
        )
    parent, prefix, name = parts
    if not name or "/" in prefix + name or "\0" in cgroups_path:
        raise InvalidSpec(WHERE, f"{cgroups_path!r} does not name a systemd unit")
    # runc's defaults.
    parent = parent or ("system.slice" if is_machine_root() else "user.slice")
    base = expand_slice(parent)
    # As in runc, a name that ends in .slice requests a slice instead of a scope.
    if name.endswith(".slice"):
        return Cgroup(expand_slice(name), "systemd", slice=parent, unit=name)
    unit = f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    return Cgroup(f"{base.rstrip('/')}/{unit}", "systemd", slice=parent, unit=unit)


def expand_slice(name: str) -> str:
    """Expand `a-b-c.slice` to `/a.slice/a-b.slice/a-b-c.slice`; `-.slice` is the root. Raises
    InvalidSpec (systemd.slice(5))."""
    if name in ("-.slice", "-"):
        return "/"
    stem = name.removesuffix(".slice")
    if stem == name or "/" in name or not all(stem.split("-")):
        raise InvalidSpec(WHERE, f"invalid slice name {name!r}")
    parts = stem.split("-")
    return "".join(f"/{'-'.join(parts[: n + 1])}.slice" for n in range(len(parts)))
