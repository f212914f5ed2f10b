"""Measures the memory of a server's processes (proc(5), smaps_rollup)."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def of_a_server(namespace: str) -> list[int]:
    """Return the pids of the processes in the network namespace of this name, and of their children
    that are pause processes in pods' namespaces."""
    file = os.stat(f"/run/netns/{namespace}")
    parents: dict[int, int] = {}
    inside: set[int] = set()
    pauses: set[int] = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            network = os.stat(f"/proc/{pid}/ns/net")
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        except OSError:  # the process has ended, or belongs to the host
            continue
        parents[pid] = int(rest.split()[1])
        if (network.st_dev, network.st_ino) == (file.st_dev, file.st_ino):
            inside.add(pid)
        elif name.partition("(")[2] == "pause":
            pauses.add(pid)
    return sorted(inside | {pid for pid in pauses if parents[pid] in inside})


def private_kib(processes: Collection[int]) -> int:
    """Return private memory of these processes together, clean and dirty, in KiB; a process that
    has ended counts as 0."""
    return _kib(processes, ("Private_Clean:", "Private_Dirty:"))


def pss_kib(processes: Collection[int]) -> int:
    """Return the processes' proportional set size in KiB: shared memory counts once."""
    return _kib(processes, ("Pss:",))


def _kib(processes: Collection[int], fields: tuple[str, ...]) -> int:
    total = 0
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(fields))
    return total
