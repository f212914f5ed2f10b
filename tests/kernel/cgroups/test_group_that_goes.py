"""A cgroup that is removed while we write to it, as systemd removes a scope with its last
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
    """`kill` succeeds although the group is removed between its open(2) and write(2), so that the
    kernel answers ENODEV. This happens in some 20 of 2000 rounds."""
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
                ours.kill()
            removal.join()


def _remove(group: Path, begin: threading.Event) -> None:
    begin.wait()
    os.rmdir(group)
