"""Tests `Cgroup.kill` while the cgroup is removed, as systemd removes a scope with its last
process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pyrunc.cgroups.group import Cgroup
from pyrunc.kernel import cgroup as tree
from tests.support.groups import own_group

ROUNDS = 2000


def test_a_group_that_is_removed_during_kill_counts_as_killed() -> None:
    with own_group("going") as group:
        racing = group / "racing"
        ours = Cgroup(f"/{racing.relative_to(tree.root())}")
        for _ in range(ROUNDS):
            racing.mkdir()
            begin = threading.Event()
            removal = threading.Thread(target=_remove, args=(racing, begin))
            removal.start()
            begin.set()
            while racing.exists():
                # In some 20 of 2000 rounds the group goes between open(2) and write(2), which fails
                # with ENODEV.
                ours.kill()
            removal.join()


def _remove(group: Path, begin: threading.Event) -> None:
    begin.wait()
    os.rmdir(group)
