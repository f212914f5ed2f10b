"""The tables of system calls and the `O_*` flags that differ between architectures. Architectures
have the names of `uname -m`."""

from __future__ import annotations

import os

from pyrunc.errors import Unsupported

MACHINES = ("x86_64", "aarch64")


class Arch:
    """One 64-bit architecture.

    - `syscalls`: name of a system call -> its number
    - `audit`: the architecture's AUDIT_ARCH_*
    - `o_directory`, `o_nofollow`: the architecture's values of O_DIRECTORY and O_NOFOLLOW (open(2))
    """

    __slots__ = ("audit", "machine", "o_directory", "o_nofollow", "syscalls")

    def __init__(
        self, machine: str, syscalls: dict[str, int], audit: int, directory: int, nofollow: int
    ) -> None:
        self.machine, self.syscalls, self.audit = machine, syscalls, audit
        self.o_directory, self.o_nofollow = directory, nofollow


_LOADED: dict[str, Arch] = {}
_HERE = os.uname().machine


def arch(machine: str = "") -> Arch:
    """Return the `Arch` of the architecture `machine` (a name of `uname -m`), by default this
    machine's. Raises Unsupported for an architecture without tables."""
    name = machine or _HERE
    if name not in _LOADED:
        if name == "x86_64":
            from pyrunc.abi.syscalls_x86_64 import TABLE as x86_64

            _LOADED[name] = Arch(name, x86_64, 0xC000003E, 0o200000, 0o400000)
        elif name == "aarch64":
            from pyrunc.abi.syscalls_aarch64 import TABLE as aarch64

            _LOADED[name] = Arch(name, aarch64, 0xC00000B7, 0o40000, 0o100000)
        else:
            raise Unsupported(
                f"architecture {name}: pyrunc has tables for {' and '.join(MACHINES)} only"
            )
    return _LOADED[name]
