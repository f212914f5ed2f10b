"""Classes of block I/O: a file says what a class is, an annotation of the pod which class a
container has.

File and annotations are those that containerd and CRI-O take (goresctrl's doc/blockio.md): a class
is a list of entries; one without `Devices` has the weight of all devices, of two that name a device
the later counts.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

import msgspec

from cri_server import typed
from cri_server.spec import classes as names
from pyrunc.errors import InvalidArgument, WrongState

KIND = "blockio"
SIZE_LIMIT_BYTES = 1 << 20
WEIGHTS = range(10, 1001)
_QUANTITY = re.compile(r"(\d+)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_RATES = {
    "read_bps": "throttleReadBpsDevice",
    "write_bps": "throttleWriteBpsDevice",
    "read_iops": "throttleReadIOPSDevice",
    "write_iops": "throttleWriteIOPSDevice",
}


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """What holds for some devices; patterns as of glob(7)."""

    devices: list[str] = msgspec.field(default_factory=list, name="Devices")
    weight: str | int = msgspec.field(default="", name="Weight")
    read_bps: str | int = msgspec.field(default="", name="ThrottleReadBps")
    write_bps: str | int = msgspec.field(default="", name="ThrottleWriteBps")
    read_iops: str | int = msgspec.field(default="", name="ThrottleReadIOPS")
    write_iops: str | int = msgspec.field(default="", name="ThrottleWriteIOPS")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    classes: dict[str, list[Entry]] = msgspec.field(default_factory=dict, name="Classes")


def class_of(name: str, pod: Mapping[str, str], container: Mapping[str, str]) -> str:
    """The class of the container `name` by the annotations of its pod and its own; empty for none."""
    return names.of(KIND, name, pod, container)


def read(path: str) -> dict[str, list[Entry]]:
    """The classes of a file. Raises WrongState."""
    import yaml  # 20 ms that most servers never need

    try:
        with open(path, "rb") as file:
            content = file.read(SIZE_LIMIT_BYTES + 1)
        if len(content) > SIZE_LIMIT_BYTES:
            raise ValueError(f"larger than {SIZE_LIMIT_BYTES} bytes")
        return typed.convert(yaml.safe_load(content) or {}, _File).classes
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise WrongState(f"block I/O classes in {path}: {' '.join(str(error).split())}") from None


def to_oci(path: str, name: str) -> dict[str, Any]:
    """The OCI object `linux.resources.blockIO` of the class `name`.

    Raises InvalidArgument for a class that the file has not, WrongState for a file or a class that
    is wrong.
    """
    if not path:
        raise InvalidArgument(
            f"block I/O class {name[:80]!r}: no classes are configured on this node"
        )
    classes = read(path)
    if name not in classes:
        raise InvalidArgument(f"there is no block I/O class {name[:80]!r} in {path}")
    return _class(path, name, classes[name])


def check(path: str) -> None:
    """Raises WrongState for a file with a class that is wrong."""
    for name, entries in read(path).items():
        _class(path, name, entries)


def _class(path: str, name: str, entries: list[Entry]) -> dict[str, Any]:
    try:
        return _limits(entries)
    except ValueError as error:
        raise WrongState(f"block I/O class {name!r} in {path}: {error}") from None


def _limits(entries: list[Entry]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    devices: dict[tuple[int, int], Entry] = {}
    for entry in entries:
        if entry.devices:
            for device in _devices(entry.devices):
                devices[device] = entry
        elif any((entry.read_bps, entry.write_bps, entry.read_iops, entry.write_iops)):
            raise ValueError("a limit without Devices")
        elif entry.weight != "":
            found["weight"] = _weight(entry.weight)
    for (major, minor), entry in devices.items():
        place = {"major": major, "minor": minor}
        if entry.weight != "":
            found.setdefault("weightDevice", []).append({**place, "weight": _weight(entry.weight)})
        for field, key in _RATES.items():
            if (value := getattr(entry, field)) != "":
                found.setdefault(key, []).append({**place, "rate": _quantity(value)})
    return found


def _devices(patterns: list[str]) -> list[tuple[int, int]]:
    """The block devices that the patterns name, links followed; a pattern may match none."""
    found = []
    for pattern in patterns:
        if not pattern.startswith("/dev/"):
            raise ValueError(f"{pattern!r} is not in /dev")
        for path in sorted(glob.glob(pattern)):
            facts = os.stat(path)
            if stat.S_ISBLK(facts.st_mode):
                found.append((os.major(facts.st_rdev), os.minor(facts.st_rdev)))
    return found


def _weight(value: str | int) -> int:
    weight = _quantity(value)
    if weight not in WEIGHTS:
        raise ValueError(f"weight {value} is not in {WEIGHTS.start}..{WEIGHTS.stop - 1}")
    return weight


def _quantity(value: str | int) -> int:
    """A number with Kubernetes' suffixes."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 50M")
    return int(match[1]) * _UNITS[match[2] or ""]
