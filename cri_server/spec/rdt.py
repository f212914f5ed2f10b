"""RDT classes limit cache and memory bandwidth; an annotation of the pod assigns a class to a
container.

A class is a group in the resctrl filesystem with the same name (Intel's closID). The
administrator's file defines classes. The first container of a class makes its group, and the group
stays, as runtime-spec requires. A group that exists already needs no definition.

The annotations are those of containerd and CRI-O (goresctrl's doc/rdt.md). The file's format is our
own. In goresctrl's format a file describes partitions of the machine, not groups: goresctrl
computes the groups from the partitions.
"""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from cri_server.spec import resource_classes
from pyrunc.errors import InvalidArgument, Unsupported, WrongState
from pyrunc.launch import rdt

KIND = "rdt"
# goresctrl's name of the root group, to which every process belongs until it is moved.
ROOT_CLASS, ROOT_GROUP = "system/default", "/"
# Folders of resctrl that are not groups.
_RESERVED = ("info", "mon_data", "mon_groups")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_LINE = re.compile(r"[A-Za-z0-9]+:[0-9]+=[0-9a-f]+(;[0-9]+=[0-9a-f]+)*")


class RdtClass(msgspec.Struct, forbid_unknown_fields=True):
    """An RDT class. `schemata`: lines for the file `schemata` of the class's group;
    `enable_monitoring`: make a monitoring group for each container."""

    schemata: list[str] = msgspec.field(default_factory=list, name="Schemata")
    enable_monitoring: bool = msgspec.field(default=False, name="EnableMonitoring")


class _RdtFile(msgspec.Struct, forbid_unknown_fields=True):
    classes: dict[str, RdtClass] = msgspec.field(default_factory=dict, name="Classes")


def read(path: str) -> dict[str, RdtClass]:
    """Return the classes that the file at `path` defines, by name. Raises WrongState for an
    unreadable or invalid file."""
    try:
        classes = resource_classes.read(path, _RdtFile).classes
        for name, entry in classes.items():
            _check(name, entry)
    except (OSError, ValueError) as error:
        raise WrongState(f"RDT classes in {path}: {' '.join(str(error).split())}") from None
    return classes


def _check(name: str, entry: RdtClass) -> None:
    if name != ROOT_CLASS and not _is_name(name):
        raise ValueError(f"class {name!r}: resctrl groups cannot have this name")
    for line in entry.schemata:
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"class {name!r}: {line!r} is not a schemata line such as L3:0=ff;1=ff"
            )


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def to_oci(path: str, name: str) -> dict[str, Any]:
    """Return the OCI object `linux.intelRdt` for the class `name`. `path`: the file of classes,
    empty without one.

    Raises InvalidArgument for a class that is neither in the file nor an existing group, WrongState
    for an invalid file and on a machine without resctrl.
    """
    try:
        root = rdt.mounted()
    except Unsupported:
        raise WrongState(
            f"RDT class {name[:80]!r}: the resctrl filesystem is not mounted on this node"
            " (mount -t resctrl resctrl /sys/fs/resctrl)"
        ) from None
    entry = (read(path) if path else {}).get(name, RdtClass())
    group = ROOT_GROUP if name == ROOT_CLASS else name
    if name != ROOT_CLASS and not (
        _is_name(name) and (entry.schemata or os.path.isdir(f"{root}/{name}"))
    ):
        configured = f" with Schemata in {path}" if path else ""
        raise InvalidArgument(
            f"RDT class {name[:80]!r} does not exist: it is neither a group in {root} nor a"
            f" class{configured}"
        )
    result: dict[str, Any] = {"closID": group}
    if entry.schemata:
        result["schemata"] = entry.schemata
    if entry.enable_monitoring:
        result["enableMonitoring"] = True
    return result
