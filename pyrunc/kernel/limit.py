"""Reads and sets resource limits of any process by prlimit(2)."""

from __future__ import annotations

from struct import Struct

from pyrunc.abi.process import RLIM_INFINITY, RLIMITS
from pyrunc.errors import InvalidArgument
from pyrunc.kernel.call import buffer, syscall

_RLIMIT = Struct("<2Q")


def number(name: str) -> int:
    """Return the number of the limit `name` (`RLIMIT_…`). Raises InvalidArgument for an unknown
    name."""
    try:
        return RLIMITS[name]
    except KeyError:
        raise InvalidArgument(f"unknown resource limit {name!r}") from None


def prlimit(
    pid: int, name: str, soft: int | None = None, hard: int | None = None
) -> tuple[int, int]:
    """Return the soft and hard limit of a process by prlimit(2). With `soft` and `hard`, set these
    limits and return the earlier ones. `pid` 0: this process. -1 stands for no limit."""
    new = (
        None
        if soft is None or hard is None
        else _RLIMIT.pack(soft & RLIM_INFINITY, hard & RLIM_INFINITY)
    )
    old = buffer(_RLIMIT.size)
    syscall("prlimit64", f"{name} of pid {pid}", pid, number(name), new, old)
    before, top = _RLIMIT.unpack(old)
    return _plain(before), _plain(top)


def _plain(value: int) -> int:
    return -1 if value == RLIM_INFINITY else value
