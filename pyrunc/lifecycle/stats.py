"""A container's usage in the form of `runc events`: one JSON object per reading, and one per OOM kill.

Limits of `max` are 2^64-1, as Go programs expect them; times are nanoseconds.
"""

from __future__ import annotations

import os
import select
import time

from pyrunc.errors import WrongState
from pyrunc.lifecycle import status as facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.cgroups.stats import Stats
    from pyrunc.lifecycle.state import State

NO_LIMIT = (1 << 64) - 1
MICROSECOND_NS = 1000
OPERATIONS = (("rbytes", "Read"), ("wbytes", "Write"))
COUNTS = (("rios", "Read"), ("wios", "Write"))


def group_of(state: State) -> Cgroup:
    """The cgroup of a living container. Raises WrongState."""
    if facts.status(state) in (facts.STOPPED, facts.CREATING):
        raise WrongState(f"container with id {state.id} is not running")
    group = state.cgroup()
    if group is None:
        raise WrongState(f"container {state.id} has no cgroup")
    return group


def once(state: State) -> dict[str, Any]:
    """One reading. Raises WrongState."""
    return {"type": "stats", "id": state.id, "data": data(group_of(state).stats())}


def stream(state: State, interval_s: float) -> Iterator[dict[str, Any]]:
    """A reading every interval and an event per OOM kill, until the container's cgroup is gone or empty."""
    group = group_of(state)
    kills = group.oom_kills() or 0
    watch = _open_watch(group)
    try:
        due = time.monotonic()
        while group.exists() and group.populated():
            now_kills = group.oom_kills() or 0
            for _ in range(now_kills - kills):
                yield {"type": "oom", "id": state.id}
            kills = now_kills
            if time.monotonic() >= due:
                yield {"type": "stats", "id": state.id, "data": data(group.stats())}
                due = time.monotonic() + interval_s
            _wait(watch, due - time.monotonic())
    finally:
        for descriptor in watch:
            os.close(descriptor)


def _open_watch(group: Cgroup) -> list[int]:
    """Files that the kernel signals by POLLPRI when processes end or the OOM killer worked."""
    found = []
    for name in ("cgroup.events", "memory.events"):
        try:
            found.append(os.open(f"{group.directory}/{name}", os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
    return found


def _wait(watch: list[int], timeout_s: float) -> None:
    waiter = select.poll()
    for descriptor in watch:
        waiter.register(descriptor, select.POLLPRI)
        try:
            os.pread(descriptor, 4096, 0)  # reading re-arms the notification
        except OSError:
            return
    waiter.poll(max(timeout_s, 0) * 1000)


def data(stats: Stats) -> dict[str, Any]:
    """The `data` of an event: what the kernel offers, in runc's words."""
    found: dict[str, Any] = {"cpu": _cpu(stats), "memory": _memory(stats), "pids": _pids(stats)}
    found["blkio"] = {
        "ioServiceBytesRecursive": _io(stats, OPERATIONS),
        "ioServicedRecursive": _io(stats, COUNTS),
    }
    found["hugetlb"] = {
        size: {"usage": use["current"], "failcnt": use["events_max"]} for size, use in stats.hugetlb.items()
    }
    return found


def _cpu(stats: Stats) -> dict[str, Any]:
    cpu = stats.cpu or {}
    found: dict[str, Any] = {
        "usage": {
            "total": cpu.get("usage_usec", 0) * MICROSECOND_NS,
            "kernel": cpu.get("system_usec", 0) * MICROSECOND_NS,
            "user": cpu.get("user_usec", 0) * MICROSECOND_NS,
        },
        "throttling": {
            "periods": cpu.get("nr_periods", 0),
            "throttledPeriods": cpu.get("nr_throttled", 0),
            "throttledTime": cpu.get("throttled_usec", 0) * MICROSECOND_NS,
        },
    }
    return found | _pressure(stats, "cpu")


def _memory(stats: Stats) -> dict[str, Any]:
    memory = stats.memory
    if memory is None:
        return {}
    raw, current, swapped = memory["stat"], memory["current"], memory.get("swap_current") or 0
    limit, swap_limit = memory.get("max"), memory.get("swap_max")
    both = NO_LIMIT if limit is None or swap_limit is None else limit + swap_limit
    usage = {
        "limit": NO_LIMIT if limit is None else limit,
        "usage": current,
        "failcnt": memory["events"].get("max", 0),
    }
    if memory.get("peak") is not None:
        usage["max"] = memory["peak"]
    found: dict[str, Any] = {
        "cache": raw.get("file", 0),
        "usage": usage,
        "swap": {"limit": both, "usage": current + swapped, "failcnt": 0},
        "kernel": {"limit": NO_LIMIT, "usage": raw.get("kernel", 0), "failcnt": 0},
        "kernelTCP": {"limit": NO_LIMIT, "usage": raw.get("sock", 0), "failcnt": 0},
        "raw": raw,
    }
    return found | _pressure(stats, "memory")


def _pids(stats: Stats) -> dict[str, Any]:
    if stats.pids is None:
        return {}
    limit = stats.pids["max"]
    return {"current": stats.pids["current"], "limit": NO_LIMIT if limit is None else limit}


def _io(stats: Stats, words: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    found = []
    for device, numbers in stats.io.items():
        major, _, minor = device.partition(":")
        found += [
            {"major": int(major), "minor": int(minor), "op": name, "value": numbers[key]}
            for key, name in words
            if key in numbers
        ]
    return found


def _pressure(stats: Stats, name: str) -> dict[str, Any]:
    return {"psi": stats.pressure[name]} if name in stats.pressure else {}
