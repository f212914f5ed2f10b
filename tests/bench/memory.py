"""What processes cost: private memory by the name that the kernel has of them (proc(5), smaps_rollup)."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

# What a pod costs beside the user's processes: each side's shim and the process that holds the namespaces.
OF_A_POD = {"containerd + runc": ("containerd-shim", "pause"), "pyrunc": ("pyrunc-shim", "pause")}


def pids(names: Collection[str]) -> list[int]:
    """Processes of the machine with one of these names; a name has 15 bytes there."""
    wanted, found = {name[:15] for name in names}, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() in wanted:
                found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def private_kib(processes: Collection[int]) -> int:
    """Private memory of these processes together, clean and dirty, in KiB; one that has ended counts nothing."""
    total = 0
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(
            int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:"))
        )
    return total
