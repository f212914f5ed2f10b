"""Block I/O classes: the administrator's file defines the classes, and an annotation of the pod
assigns one to a container.

File and annotations have the format of containerd and CRI-O (goresctrl's doc/blockio.md). A class
is a list of entries. An entry without `Devices` sets the weight for all devices. If two entries
name the same device, the later entry applies.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from typing import Any

import msgspec

from cri_server.spec import resource_classes
from pyrunc.errors import InvalidArgument, WrongState

KIND = "blockio"
# The range of runtime-spec's `blockIO.weight`.
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


class BlockIoEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The limits for some devices. `devices` are path patterns (glob(7))."""

    devices: list[str] = msgspec.field(default_factory=list, name="Devices")
    weight: str | int = msgspec.field(default="", name="Weight")
    read_bps: str | int = msgspec.field(default="", name="ThrottleReadBps")
    write_bps: str | int = msgspec.field(default="", name="ThrottleWriteBps")
    read_iops: str | int = msgspec.field(default="", name="ThrottleReadIOPS")
    write_iops: str | int = msgspec.field(default="", name="ThrottleWriteIOPS")


class _BlockIoFile(msgspec.Struct, forbid_unknown_fields=True):
    classes: dict[str, list[BlockIoEntry]] = msgspec.field(default_factory=dict, name="Classes")


def read(path: str) -> dict[str, list[BlockIoEntry]]:
    """Return the block I/O classes that the file at `path` defines, by name. Raises WrongState for
    an unreadable or invalid file."""
    try:
        return resource_classes.read(path, _BlockIoFile).classes
    except (OSError, ValueError) as error:
        raise WrongState(f"block I/O classes in {path}: {' '.join(str(error).split())}") from None


def to_oci(path: str, name: str) -> dict[str, Any]:
    """Return the OCI object `linux.resources.blockIO` for the class `name` in the file `path`.

    Raises InvalidArgument if the file lacks the class, WrongState if the file or the class is
    invalid.
    """
    if not path:
        raise InvalidArgument(
            f"block I/O class {name[:80]!r}: no classes are configured on this node"
        )
    classes = read(path)
    if name not in classes:
        raise InvalidArgument(f"block I/O class {name[:80]!r} is not in {path}")
    return _class_to_oci(path, name, classes[name])


def check(path: str) -> None:
    """Check all block I/O classes that the file at `path` defines. Raises WrongState."""
    for name, entries in read(path).items():
        _class_to_oci(path, name, entries)


def _class_to_oci(path: str, name: str, entries: list[BlockIoEntry]) -> dict[str, Any]:
    try:
        return _limits(entries)
    except ValueError as error:
        raise WrongState(f"block I/O class {name!r} in {path}: {error}") from None


def _limits(entries: list[BlockIoEntry]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    devices: dict[tuple[int, int], BlockIoEntry] = {}
    for entry in entries:
        if entry.devices:
            for device in _devices(entry.devices):
                devices[device] = entry
        elif any((entry.read_bps, entry.write_bps, entry.read_iops, entry.write_iops)):
            raise ValueError("an entry has a limit, but no Devices")
        elif entry.weight != "":
            limits["weight"] = _weight(entry.weight)
    for (major, minor), entry in devices.items():
        place = {"major": major, "minor": minor}
        if entry.weight != "":
            limits.setdefault("weightDevice", []).append({**place, "weight": _weight(entry.weight)})
        for field, key in _RATES.items():
            if (value := getattr(entry, field)) != "":
                limits.setdefault(key, []).append({**place, "rate": _quantity(value)})
    return limits


def _devices(patterns: list[str]) -> list[tuple[int, int]]:
    """Return the major and minor numbers of the block devices whose paths match `patterns`.
    Symlinks are followed, and a pattern without a match is no error. Raises ValueError for a
    pattern outside /dev."""
    devices = []
    for pattern in patterns:
        if not pattern.startswith("/dev/"):
            raise ValueError(f"{pattern!r} is not in /dev")
        for path in sorted(glob.glob(pattern)):
            device_stat = os.stat(path)
            if stat.S_ISBLK(device_stat.st_mode):
                devices.append((os.major(device_stat.st_rdev), os.minor(device_stat.st_rdev)))
    return devices


def _weight(value: str | int) -> int:
    weight = _quantity(value)
    if weight not in WEIGHTS:
        raise ValueError(f"weight {value} is not in {WEIGHTS.start}..{WEIGHTS.stop - 1}")
    return weight


def _quantity(value: str | int) -> int:
    """Parse a number with a unit as in Kubernetes, such as 50M. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 50M")
    return int(match[1]) * _UNITS[match[2] or ""]
