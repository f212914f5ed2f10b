"""Finds a container's cgroup and reads its CPU time. `BUSY` is a command that uses CPU time."""

from __future__ import annotations

from pathlib import Path

from tests.cri.server_harness import Server

BUSY = ["sh", "-c", "while :; do :; done"]


def group_of(server: Server, container: str) -> Path:
    """Return the container's cgroup in the v2 tree, found by the container's id."""
    roots = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    root = next(p for p in roots if (p / "cgroup.procs").exists())
    (folder,) = (
        path for path in root.glob(f"{server.folder.name}/**/") if path.name.endswith(container)
    )
    return folder


def used_ns(group: Path) -> int:
    """Return the CPU time that a cgroup has used, in nanoseconds."""
    lines = (group / "cpu.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)["usage_usec"]) * 1000
