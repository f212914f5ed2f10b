"""`linux.intelRdt`: sets a container's share of caches and memory bandwidth in the resctrl
filesystem.

A group (class of service) is a folder with `schemata` and `tasks`. A group that the configuration
names by closID belongs to the node's administrator. A start uses this group, and makes a missing
one if the configuration has schemata. The runtime never removes it. Without a closID the container
gets a private group, named by its id. The private group and the container's monitoring group are
removed with the container. Source: runtime-spec config-linux.md, "IntelRdt", and the kernel's
Documentation/filesystems/resctrl.rst.
"""

from __future__ import annotations

import os

from pyrunc.errors import InvalidSpec, KernelError, Unsupported
from pyrunc.kernel.fd import write_once
from pyrunc.kernel.mountinfo import mount_points

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.undo import Undo

    Rdt = Mapping[str, Any]

WHERE = "linux.intelRdt"


def mounted() -> str:
    """Return the mount point of the resctrl filesystem. Raises Unsupported when it is not
    mounted."""
    for mount in mount_points():
        if mount.kind == "resctrl":
            return mount.path
    raise Unsupported(
        f"{WHERE}: no resctrl filesystem is mounted (mount -t resctrl resctrl /sys/fs/resctrl)"
    )


def enter(rdt: Rdt, container_id: str, pid: int, undo: Undo, root: str) -> None:
    """Put the container's first process `pid` into the container's resctrl group and, with
    `enableMonitoring`, into its monitoring group. Makes missing groups. `undo`: gets steps that
    remove new groups; `root`: the mount point of resctrl.

    Raises InvalidSpec when an existing group has other schemata than the configuration, or when the
    group of a closID is missing and the configuration has no schemata. Raises KernelError.
    """
    group = group_of(rdt, container_id, root)
    schemata = schemata_of(rdt)
    if not os.path.isdir(group):
        if rdt.get("closID") and not schemata:
            # config-linux.md, "IntelRdt": without schemata the group of a closID must exist.
            raise InvalidSpec(
                f"{WHERE}.closID",
                f"group {group} does not exist, and schemata to create it are missing",
            )
        _make_group(group)
        undo.push(f"resctrl group {group}", _remove_group, group)
        _write_schemata(group, schemata)
    elif schemata:
        _require_schemata(group, schemata)
    # Now, while there is one process: its children inherit the group, but a child that was forked
    # before would stay in the other group.
    _write(group, "tasks", str(pid))
    if rdt.get("enableMonitoring"):
        monitor = monitor_of(rdt, container_id, root)
        _make_group(monitor)
        undo.push(f"resctrl group {monitor}", _remove_group, monitor)
        _write(monitor, "tasks", str(pid))


def join(rdt: Rdt, container_id: str, pid: int, root: str) -> None:
    """Put another process, `pid`, into the container's existing resctrl group and, with
    `enableMonitoring`, into its monitoring group. Raises KernelError."""
    _write(group_of(rdt, container_id, root), "tasks", str(pid))
    if rdt.get("enableMonitoring"):
        _write(monitor_of(rdt, container_id, root), "tasks", str(pid))


def outlives(rdt: Rdt) -> bool:
    """Return whether the container has private resctrl groups, which stay after its processes have
    ended."""
    return not rdt.get("closID") or bool(rdt.get("enableMonitoring"))


def leave_mounted(rdt: Rdt, container_id: str) -> None:
    """Call `leave` if resctrl is mounted; otherwise there are no groups. Raises KernelError."""
    try:
        root = mounted()
    except Unsupported:
        return
    leave(rdt, container_id, root)


def leave(rdt: Rdt, container_id: str, root: str) -> None:
    """Remove the private groups that `enter` has made for this container. Missing groups are no
    error."""
    if rdt.get("enableMonitoring"):
        _remove_group(monitor_of(rdt, container_id, root))
    if not rdt.get("closID"):
        _remove_group(group_of(rdt, container_id, root))


def group_of(rdt: Rdt, container_id: str, root: str) -> str:
    """Return the folder of the container's resctrl group. For the closID `/` this is `root`, the
    mount point of resctrl."""
    name = rdt.get("closID") or container_id
    # runtime-spec: closID "/" is the default group, with all processes that are in no other.
    return root if name == "/" else f"{root}/{name}"


def monitor_of(rdt: Rdt, container_id: str, root: str) -> str:
    """Return the folder of the container's monitoring group."""
    return f"{group_of(rdt, container_id, root)}/mon_groups/{container_id}"


def schemata_of(rdt: Rdt) -> list[str]:
    """Return the lines for the group's file `schemata`: the fields `l3CacheSchema`, `memBwSchema`
    and `schemata` of the configuration, in this order."""
    lines = [rdt.get("l3CacheSchema"), rdt.get("memBwSchema"), *(rdt.get("schemata") or ())]
    return [line.strip() for line in lines if line and line.strip()]


def _require_schemata(group: str, schemata: list[str]) -> None:
    """Raise InvalidSpec unless the group has the configuration's `schemata` already. The group's
    schemata are never changed, because other containers may use the group."""
    with open(f"{group}/schemata", encoding="ascii") as file:
        present = dict(map(_parse_schema, file.read().splitlines()))
    for line in schemata:
        resource, domains = _parse_schema(line)
        actual = present.get(resource, {})
        if any(actual.get(domain) != value for domain, value in domains.items()):
            raise InvalidSpec(f"{WHERE}.closID", f"the schemata of {group} are not {line!r}")


def _parse_schema(line: str) -> tuple[str, dict[str, int | str]]:
    """Parse `L3:0=0f;1=f` to ("L3", {"0": 15, "1": 15}); bandwidth is decimal, masks are
    hexadecimal."""
    resource, _, rest = line.strip().partition(":")
    # Compared as numbers, because the kernel pads what it prints (show_doms).
    base = 10 if resource == "MB" else 16
    domains: dict[str, int | str] = {}
    for part in rest.split(";"):
        domain, _, value = part.strip().partition("=")
        try:
            domains[domain] = int(value, base)
        except ValueError:
            domains[domain] = value
    return resource, domains


def _write_schemata(group: str, lines: list[str]) -> None:
    if lines:
        _write(group, "schemata", "".join(f"{line}\n" for line in lines))


def _make_group(group: str) -> None:
    try:
        os.mkdir(group, 0o755)
    except FileExistsError:
        pass
    except OSError as error:
        raise KernelError.of(error, "mkdir", f"'{group}'", _last_status(group)) from None


def _remove_group(group: str) -> None:
    try:
        os.rmdir(group)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise KernelError.of(error, "rmdir", f"'{group}'") from None


def _write(group: str, name: str, text: str) -> None:
    try:
        write_once(f"{group}/{name}", text.encode())
    except OSError as error:
        raise KernelError.of(
            error, "write", f"{text.strip()!r} to '{group}/{name}'", _last_status(group)
        ) from None


def _last_status(group: str) -> str:
    """Return the kernel's reason for refusing the last write (`info/last_cmd_status`); empty if
    there is none."""
    while group not in ("/", ""):
        try:
            with open(f"{group}/info/last_cmd_status", encoding="ascii") as file:
                status = file.read().strip()
            return "" if status == "ok" else status
        except OSError:
            group = os.path.dirname(group)
    return ""
