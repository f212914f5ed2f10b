"""Classes of caches and memory bandwidth (RDT): an annotation of the pod says which class a
container has.

A class is a group of the resctrl filesystem, called like it (Intel's closID). The file says what
the group of a class is to be, and the first container of the class makes it; it stays, as
runtime-spec says. A group that is there, whoever has made it, needs no file. Its annotations are
those that containerd and CRI-O take (goresctrl's doc/rdt.md); the file is ours: goresctrl's divides
a machine into partitions, and its program writes the groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from cri_server import typed
from cri_server.spec import classes
from pyrunc.errors import InvalidArgument, Unsupported, WrongState
from pyrunc.launch import rdt

KIND = "rdt"
SIZE_LIMIT_BYTES = 1 << 20
# goresctrl's word for the group that all processes are in.
ROOT_CLASS, ROOT_GROUP = "system/default", "/"
# resctrl's own folders, which are no groups.
_RESERVED = ("info", "mon_data", "mon_groups")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_LINE = re.compile(r"[A-Za-z0-9]+:[0-9]+=[0-9a-f]+(;[0-9]+=[0-9a-f]+)*")


class Class(msgspec.Struct, forbid_unknown_fields=True):
    """What a class' group is to be: lines of its file `schemata`, and whether each container gets a
    group that is measured."""

    schemata: list[str] = msgspec.field(default_factory=list, name="Schemata")
    enable_monitoring: bool = msgspec.field(default=False, name="EnableMonitoring")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    classes: dict[str, Class] = msgspec.field(default_factory=dict, name="Classes")


def class_of(name: str, pod: Mapping[str, str], container: Mapping[str, str]) -> str:
    """The class of the container `name` by the annotations of its pod and its own; empty for none."""
    return classes.of(KIND, name, pod, container)


def read(path: str) -> dict[str, Class]:
    """The classes of a file. Raises WrongState."""
    import yaml  # 20 ms that most servers never need

    try:
        with open(path, "rb") as file:
            content = file.read(SIZE_LIMIT_BYTES + 1)
        if len(content) > SIZE_LIMIT_BYTES:
            raise ValueError(f"larger than {SIZE_LIMIT_BYTES} bytes")
        found = typed.convert(yaml.safe_load(content) or {}, _File).classes
        for name, entry in found.items():
            _check(name, entry)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise WrongState(f"RDT classes in {path}: {' '.join(str(error).split())}") from None
    return found


def _check(name: str, entry: Class) -> None:
    if name != ROOT_CLASS and not _is_name(name):
        raise ValueError(f"class {name!r}: a group of resctrl cannot be called so")
    for line in entry.schemata:
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"class {name!r}: {line!r} is no line of schemata such as L3:0=ff;1=ff"
            )


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def to_oci(path: str, name: str) -> dict[str, Any]:
    """The OCI object `linux.intelRdt` of the class `name`.

    Raises InvalidArgument for a class that is neither in the file nor a group, WrongState for a
    file that is wrong and for a machine without resctrl.
    """
    try:
        root = rdt.mounted()
    except Unsupported:
        raise WrongState(
            f"RDT class {name[:80]!r}: this node has no resctrl filesystem (mount -t resctrl resctrl /sys/fs/resctrl)"
        ) from None
    entry = (read(path) if path else {}).get(name, Class())
    group = ROOT_GROUP if name == ROOT_CLASS else name
    if name != ROOT_CLASS and not (
        _is_name(name) and (entry.schemata or os.path.isdir(f"{root}/{name}"))
    ):
        configured = f" with Schemata in {path}" if path else ""
        raise InvalidArgument(
            f"there is no RDT class {name[:80]!r}: neither a group in {root} nor one{configured}"
        )
    result: dict[str, Any] = {"closID": group}
    if entry.schemata:
        result["schemata"] = entry.schemata
    if entry.enable_monitoring:
        result["enableMonitoring"] = True
    return result
