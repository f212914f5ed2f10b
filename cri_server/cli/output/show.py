"""Formats values for people: ages, sizes, and what /proc tells about a process (memory, namespaces,
cgroup)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from cri_server.api import api_pb2 as api
from pyrunc.errors import VISIBLE
from pyrunc.kernel import process
from pyrunc.kernel.cgroup import own_path

SHORT = 12  # characters of an id in tables, as in docker
NAMESPACES = ("net", "ipc", "uts", "pid", "mnt", "cgroup", "user")
PAUSED = "paused"
POD_STATES = {api.SANDBOX_READY: "ready", api.SANDBOX_NOTREADY: "not ready"}
STATES = {
    api.CONTAINER_CREATED: "created",
    api.CONTAINER_RUNNING: "running",
    api.CONTAINER_EXITED: "exited",
    api.CONTAINER_UNKNOWN: "unknown",
}


def printable(text: str) -> str:
    """Escape control characters, so that text from a container or an image cannot control the
    terminal."""
    return text.translate(VISIBLE)


def age(since_ns: int) -> str:
    """Return the time since `since_ns` (nanoseconds since 1970) as `5s`, `3m`, `2h` or `4d`."""
    seconds = max(0, time.time_ns() - since_ns) // 1_000_000_000
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def size(count: int) -> str:
    """Format a number of bytes, such as `1.9MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}GB"


def command_line(pid: int) -> str:
    """Return the arguments of a process, separated by spaces; empty for a kernel thread. Raises
    OSError."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def processes(pids: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line for each pair (name, pid): pid, name, resident memory and command of the
    process."""
    lines = []
    for name, pid in pids:
        try:
            command = printable(command_line(pid)[:60])
        except OSError:
            command = "(gone)"
        facts = process.stat(pid)
        resident_bytes = facts.resident * os.sysconf("SC_PAGE_SIZE") if facts else 0
        lines.append(f"{pid:>8}  {name:<20} {size(resident_bytes):>7}  {command}")
    return lines


def namespaces(pid: int) -> str:
    """Return which namespaces a process shares with pyrunc-cri, such as `net own, ipc own, … user
    host`. `host` is a shared namespace, `own` a different one. Returns `(gone)` if the process has
    ended."""
    parts = []
    for kind in NAMESPACES:
        try:
            # A namespace is its inode on nsfs (namespaces(7)).
            same = (
                os.stat(f"/proc/{pid}/ns/{kind}").st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino
            )
        except OSError:
            return "(gone)"
        parts.append(f"{kind} {'host' if same else 'own'}")
    return ", ".join(parts)


def cgroup(pid: int) -> str:
    """Return the cgroup v2 path of a process; `(gone)` if the process has ended."""
    return own_path(pid) or "(gone)"
