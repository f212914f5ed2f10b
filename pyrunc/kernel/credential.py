"""Capabilities by name, and the process attributes that guard privilege: dumpable, no_new_privs."""

from __future__ import annotations

import prctl

from pyrunc.abi.capability import CAPABILITIES
from pyrunc.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMES = {bit: name for name, bit in CAPABILITIES.items()}
_last: int | None = None


def last_capability() -> int:
    """The highest capability this kernel knows (/proc/sys/kernel/cap_last_cap)."""
    global _last
    if _last is None:
        with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
            _last = int(file.read())
    return _last


def capability_bit(name: str) -> int:
    """The number of `CAP_…` (any case, with or without the prefix); InvalidArgument when it is unknown."""
    wanted = name.upper()
    bit = CAPABILITIES.get(wanted if wanted.startswith("CAP_") else f"CAP_{wanted}")
    if bit is None:
        raise InvalidArgument(f"unknown capability {name!r}")
    return bit


def mask(names: Iterable[str]) -> int:
    """A 64-bit set of these capabilities."""
    result = 0
    for name in names:
        result |= 1 << capability_bit(name)
    return result


def names(bits: int) -> list[str]:
    """The capabilities of a set, in the order of their numbers; numbers without a name are `CAP_<number>`."""
    return [_NAMES.get(bit, f"CAP_{bit}") for bit in range(64) if bits >> bit & 1]


def process_sets(pid: int | str = "self") -> dict[str, int]:
    """`inheritable`, `permitted`, `effective`, `bounding`, `ambient` of a process, from /proc/PID/status."""
    keys = {
        "CapInh": "inheritable",
        "CapPrm": "permitted",
        "CapEff": "effective",
        "CapBnd": "bounding",
        "CapAmb": "ambient",
    }
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {keys[key]: int(value, 16) for key, _, value in pairs if key in keys}


def set_dumpable(on: bool) -> None:
    """prctl(PR_SET_DUMPABLE): whether others of our uid may trace us and open /proc/PID/…"""
    prctl.set_dumpable(on)


def is_dumpable() -> bool:
    """prctl(PR_GET_DUMPABLE)."""
    return bool(prctl.get_dumpable())


def set_no_new_privs() -> None:
    """prctl(PR_SET_NO_NEW_PRIVS): no execve gives more rights from now on; cannot be undone."""
    prctl.set_no_new_privs(1)


def has_no_new_privs() -> bool:
    """prctl(PR_GET_NO_NEW_PRIVS)."""
    return bool(prctl.get_no_new_privs())
