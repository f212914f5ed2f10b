"""Builds the JSON objects of `runc events`: one with a container's usage for each reading, and one
for each OOM kill.

A cgroup limit of `max` becomes 2^64-1, as clients in Go expect. Times are nanoseconds.
"""

from __future__ import annotations

import os
import select
import time

from pyrunc.container import status
from pyrunc.errors import WrongState
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import interface_counters, status_fields
from pyrunc.spec.check import cpu_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.cgroups.stats import Stats
    from pyrunc.container.state import State

# What Go's uint64 makes of -1; consumers of runc's events compare with it.
NO_LIMIT = (1 << 64) - 1
MICROSECOND_NS = 1000
OPERATIONS = (("rbytes", "Read"), ("wbytes", "Write"))
COUNTS = (("rios", "Read"), ("wios", "Write"))


def group_of(state: State) -> Cgroup:
    """Return the cgroup of a created, running or paused container. Raises WrongState for any other
    container, and for a container without a cgroup."""
    if status.status(state) in (status.STOPPED, status.CREATING):
        raise WrongState(f"container with id {state.id} is not running")
    group = state.group()
    if group is None:
        raise WrongState(f"container {state.id} has no cgroup")
    return group


def once(state: State) -> dict[str, Any]:
    """Return one reading of the container's usage, the object that `pyrunc events --stats` prints.
    Raises WrongState in the cases of `group_of`."""
    return _reading(state, group_of(state))


def _reading(state: State, group: Cgroup) -> dict[str, Any]:
    usage = data(group.stats())
    # Without the pids controller, which a delegated tree need not have.
    if not usage["pids"]:
        usage["pids"] = {"current": len(group.processes())}
    usage["cpuset"] = {**_allowed(state.pid), **usage["cpuset"]}
    usage["network_interfaces"] = interfaces(state.pid)
    return {"type": "stats", "id": state.id, "data": usage}


def stream(state: State, interval_s: float) -> Iterator[dict[str, Any]]:
    """Yield an object with the container's usage every `interval_s` seconds, and an object for each
    OOM kill. Ends when the container's cgroup is gone or empty. Raises WrongState in the cases of
    `group_of`."""
    group = group_of(state)
    kills = group.oom_kills() or 0
    watch = _open_watch(group)
    try:
        due = time.monotonic()
        while group.exists() and group.populated():
            # The counter tells how many: two kills between two readings cause only one wake-up.
            now_kills = group.oom_kills() or 0
            for _ in range(now_kills - kills):
                yield {"type": "oom", "id": state.id}
            kills = now_kills
            if time.monotonic() >= due:
                yield _reading(state, group)
                due = time.monotonic() + interval_s
            _wait(watch, due - time.monotonic())
    finally:
        close_all(watch)


def _open_watch(group: Cgroup) -> list[int]:
    """Open the group's event files. The kernel signals POLLPRI on these when the group becomes
    empty or the OOM killer has killed a process."""
    descriptors = []
    for name in ("cgroup.events", "memory.events"):
        try:
            descriptors.append(os.open(f"{group.directory}/{name}", os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
    return descriptors


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
    """Convert a group's statistics to the `data` of a stats event, with runc's keys."""
    usage: dict[str, Any] = {"cpu": _cpu(stats), "memory": _memory(stats), "pids": _pids(stats)}
    usage["cpuset"] = {name: list(cpu_list(text, name)) for name, text in stats.cpuset.items()}
    usage["blkio"] = {
        "ioServiceBytesRecursive": _io(stats, OPERATIONS),
        "ioServicedRecursive": _io(stats, COUNTS),
    } | _pressure(stats, "io")
    usage["intel_rdt"] = {}
    usage["hugetlb"] = {
        size: {"usage": use["current"], "failcnt": use["events_max"]}
        for size, use in stats.hugetlb.items()
    }
    return usage


def _cpu(stats: Stats) -> dict[str, Any]:
    cpu = stats.cpu or {}
    usage: dict[str, Any] = {
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
    return usage | _pressure(stats, "cpu")


def _memory(stats: Stats) -> dict[str, Any]:
    memory = stats.memory
    if memory is None:
        return {}
    raw, limit = memory.stat, memory.max
    # Cgroup v1's swap counters, which runc's events report, include the memory.
    both = NO_LIMIT if limit is None or memory.swap_max is None else limit + memory.swap_max
    usage = {
        "limit": NO_LIMIT if limit is None else limit,
        "usage": memory.current,
        "failcnt": memory.events.get("max", 0),
    }
    if memory.peak is not None:
        usage["max"] = memory.peak
    report: dict[str, Any] = {
        "cache": raw.get("file", 0),
        "usage": usage,
        "swap": {"limit": both, "usage": memory.current + (memory.swap_current or 0), "failcnt": 0},
        "kernel": {"limit": NO_LIMIT, "usage": raw.get("kernel", 0), "failcnt": 0},
        "kernelTCP": {"limit": NO_LIMIT, "usage": raw.get("sock", 0), "failcnt": 0},
        "raw": raw,
    }
    return report | _pressure(stats, "memory")


def _pids(stats: Stats) -> dict[str, Any]:
    if stats.pids is None:
        return {}
    limit = stats.pids["max"]
    return {"current": stats.pids["current"], "limit": NO_LIMIT if limit is None else limit}


def _io(stats: Stats, keys: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    entries = []
    for device, numbers in stats.io.items():
        major, _, minor = device.partition(":")
        entries += [
            {"major": int(major), "minor": int(minor), "op": name, "value": numbers[key]}
            for key, name in keys
            if key in numbers
        ]
    return entries


def _pressure(stats: Stats, name: str) -> dict[str, Any]:
    return {"psi": stats.pressure[name]} if name in stats.pressure else {}


def _allowed(pid: int) -> dict[str, list[int]]:
    """Return the numbers of the processors (`cpus`) and memory nodes (`mems`) on which the
    container's init may run. Reads /proc/PID/status, so no cpuset controller is needed."""
    try:
        fields = status_fields(pid)
    except OSError:  # it ended in between
        return {}
    keys = (("cpus", b"Cpus_allowed_list"), ("mems", b"Mems_allowed_list"))
    return {key: list(cpu_list(fields[name].decode(), key)) for key, name in keys if name in fields}


# Columns of /proc/PID/net/dev (proc_pid_net(5)) under the names of runc's events.
_COUNTERS = {
    "RxBytes": 0,
    "RxPackets": 1,
    "RxErrors": 2,
    "RxDropped": 3,
    "TxBytes": 8,
    "TxPackets": 9,
    "TxErrors": 10,
    "TxDropped": 11,
}


def interfaces(pid: int) -> list[dict[str, Any]] | None:
    """Return the counters of the network interfaces in the network namespace of the process `pid`,
    without loopback. None when there are no such interfaces, when the process is gone, or when its
    network namespace is the runtime's."""
    # With the host's network these would be the machine's counters.
    if _network_of(pid) in ("", _network_of("self")):
        return None
    reports = [
        {"Name": name} | {key: columns[place] for key, place in _COUNTERS.items()}
        for name, columns in interface_counters(pid).items()
    ]
    return reports or None


def _network_of(pid: int | str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""
