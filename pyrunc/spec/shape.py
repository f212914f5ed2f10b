"""Checks types and ranges of JSON values by their shapes. A shape describes the allowed values. It
is one of:

- TEXT or FLAG
- a range (least, greatest) of integers
- [shape of the items], for a list
- {property: shape of its value}, for an object. A property with the name ANY stands for all others.

`linux.resources`, `linux.seccomp` and `linux.intelRdt` stay JSON objects: the code that parses them
gets them in the shapes below, without nulls. Unknown properties are passed on unchecked. Source:
runtime-spec schema/defs-linux.json and config-linux.json.
"""

from __future__ import annotations

from pyrunc.errors import InvalidSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TEXT, FLAG = "a string", "true or false"
INT64, UINT64 = (-(1 << 63), (1 << 63) - 1), (0, (1 << 64) - 1)
UINT32, UINT16 = (0, (1 << 32) - 1), (0, (1 << 16) - 1)
ANY = "*"
"""In the shape of an object: stands for all properties that the shape does not name."""

# A device number has 32 bits; a negative one stands for all, as in runc.
_DEVICE = {"major": (-(1 << 63), (1 << 32) - 1), "minor": (-(1 << 63), (1 << 32) - 1)}
_THROTTLE = [{**_DEVICE, "rate": UINT64}]
RESOURCES: Any = {
    "devices": [{**_DEVICE, "allow": FLAG, "type": TEXT, "access": TEXT}],
    "memory": {
        "limit": INT64, "reservation": INT64, "swap": INT64, "kernel": INT64, "kernelTCP": INT64,
        "swappiness": UINT64,
        "disableOOMKiller": FLAG, "useHierarchy": FLAG, "checkBeforeUpdate": FLAG,
    },
    "cpu": {
        "shares": UINT64, "quota": INT64, "burst": UINT64, "period": UINT64,
        "realtimeRuntime": INT64, "realtimePeriod": UINT64, "cpus": TEXT, "mems": TEXT,
        "idle": INT64,
    },
    "pids": {"limit": INT64},
    "blockIO": {
        "weight": UINT16, "leafWeight": UINT16,
        "weightDevice": [{**_DEVICE, "weight": UINT16, "leafWeight": UINT16}],
        "throttleReadBpsDevice": _THROTTLE, "throttleWriteBpsDevice": _THROTTLE,
        "throttleReadIOPSDevice": _THROTTLE, "throttleWriteIOPSDevice": _THROTTLE,
    },
    "hugepageLimits": [{"pageSize": TEXT, "limit": UINT64}],
    "network": {"classID": UINT32, "priorities": [{"name": TEXT, "priority": UINT32}]},
    "rdma": {ANY: {"hcaHandles": UINT32, "hcaObjects": UINT32}},
    "unified": {ANY: TEXT},
}  # fmt: skip
SECCOMP = {
    "defaultAction": TEXT, "defaultErrnoRet": UINT32, "architectures": [TEXT], "flags": [TEXT],
    "listenerPath": TEXT, "listenerMetadata": TEXT,
    "syscalls": [
        {
            "names": [TEXT], "action": TEXT, "errnoRet": UINT32,
            "args": [{"index": UINT32, "value": UINT64, "valueTwo": UINT64, "op": TEXT}],
        }
    ],
}  # fmt: skip


INTEL_RDT = {
    "closID": TEXT, "l3CacheSchema": TEXT, "memBwSchema": TEXT, "schemata": [TEXT],
}  # fmt: skip


def shaped(value: Any, shape: Any, path: str) -> Any:
    """Check `value` and return it without nulls. If a part of it does not fit `shape`, raises
    InvalidSpec with the part's JSON path."""
    if shape is TEXT:
        if type(value) is not str:
            raise InvalidSpec(path, "must be a string")
        if not is_plain(value):
            raise InvalidSpec(path, "must not contain a NUL byte or half a surrogate pair")
        return value
    if type(shape) is tuple:
        if type(value) is not int:
            raise InvalidSpec(path, "must be an integer")
        if not shape[0] <= value <= shape[1]:
            raise InvalidSpec(path, f"{value} is not between {shape[0]} and {shape[1]}")
        return value
    if type(shape) is list:
        if type(value) is not list:
            raise InvalidSpec(path, "must be a list")
        # For long lists (environments, system calls) this takes half the time of the loop below,
        # which makes a path for each item.
        if shape[0] is TEXT and all(type(item) is str and is_plain(item) for item in value):
            return value
        return [shaped(item, shape[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if type(shape) is dict:
        if type(value) is not dict:
            raise InvalidSpec(path, "must be an object")
        others = shape.get(ANY)
        return {
            key: shaped(item, shape.get(key, others), f"{path}.{key}")
            for key, item in value.items()
            if item is not None
        }
    if shape is FLAG and type(value) is not bool:
        raise InvalidSpec(path, "must be true or false")
    return value


def is_plain(text: str) -> bool:
    """Return whether a text can be passed to the kernel. False for a NUL, and for surrogates other
    than the escapes of bytes that are not UTF-8."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
