"""Provides a test with its own cgroup, because some programs make their cgroups beside the one in
which they run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import ledger, session

# `sh -c ENTER GROUP PROGRAM…` runs a program in a group.
ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
REMOVE_TIMEOUT_S = 20.0


@contextmanager
def own_group(name: str) -> Iterator[Path]:
    """Make a new cgroup in the v2 tree, with an empty cgroup `own` in it; yield its path. After the
    `with` block remove both and all cgroups below, which must have no processes."""
    group = Path(ledger.cgroup_root(), session.name(name))
    (group / "own").mkdir(parents=True)
    try:
        yield group
    finally:
        _remove(group)


def below(root: Path, part: str) -> list[Path]:
    """Return the cgroups below `root` with `part` in their names."""
    # `Path.rglob` would fail if a cgroup is removed meanwhile.
    return [
        Path(folder, name) for folder, names, _ in os.walk(root) for name in names if part in name
    ]


def _remove(group: Path) -> None:
    """Remove a cgroup and those below, and wait for processes that have been killed."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while group.exists():
        try:
            for below, _, _ in os.walk(group, topdown=False):
                os.rmdir(below)
        except OSError:
            assert time.monotonic() < deadline, f"{group} is in use"
            time.sleep(0.01)
