"""Decides which of two workers of pytest-xdist runs which tests (`make test`: -n 2).

The ledger counts all objects of the machine. Tests whose cgroups, network devices, mounts or
namespaces may have any name therefore run one after the other in one worker. The other worker
begins with the tests in the guest, an emulator that occupies a processor for minutes. The rest are
files whose tests make no such objects, or only objects with their worker's mark: each of these
files runs on any free worker, and the worker that counts the machine leaves the marked objects to
the other.

Without workers all tests run in the order of their files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

GUEST, MACHINE = "guest", "machine"
# Beginnings of paths below tests/. A server of tests/cri/server_harness.py has a separate network
# namespace, and its groups are named like its folder, whose name has the mark.
IN_THE_GUEST = ("vm/",)
ANYWHERE = ("architecture/", "unit/", "cri/images/", "cri/rpc/", "cri/streaming/", "cri/test_")

Item = TypeVar("Item")


def worker(config: Any) -> int:
    """Return the number of this worker, from 1 on; 0 without workers, and in the process that
    controls them."""
    words: dict[str, str] = getattr(config, "workerinput", {})
    return int(words["workerid"].removeprefix("gw")) + 1 if words else 0


def unit_of(path: str) -> str:
    """Return the unit of the test at `path` (`tests/…`, with or without `::` and a name). All tests
    of a unit run in one worker. The unit is GUEST, MACHINE or the file's path."""
    file = path.partition("::")[0]
    below = file.removeprefix("tests/")
    if below.startswith(IN_THE_GUEST):
        return GUEST
    return file if below.startswith(ANYWHERE) else MACHINE


def in_order(items: Sequence[Item], paths: Sequence[str]) -> list[Item]:
    """Return the items with those of the longest units, GUEST and MACHINE, first; the rest keep
    their order."""
    # So each of these units begins on a separate worker.
    ranks = {GUEST: 0, MACHINE: 1}
    pairs = zip(items, paths, strict=True)
    return [item for item, _ in sorted(pairs, key=lambda pair: ranks.get(unit_of(pair[1]), 2))]


def scheduler(config: Any, log: Any) -> Any:
    """Return an xdist scheduler that gives all tests of a unit to one worker, in collection
    order."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)
