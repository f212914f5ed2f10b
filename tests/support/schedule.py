"""Which of two workers of pytest-xdist runs what (`make test`: -n 2).

The ledger counts the machine, so tests whose groups, links, mounts or namespaces may have any name
run one after the other, in one worker. The other one starts with the guest, an emulator that keeps
a processor busy for minutes. Then come files whose tests make nothing of the machine, or only what
bears their worker's mark: each runs where there is room, and the worker that counts the machine
leaves to the other what has its mark. Without workers all run in the order of their files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

GUEST, MACHINE = "guest", "machine"
# Beginnings of paths below tests/. A server of tests/cri/server_harness.py is in a network
# namespace of its own, and its folder's name, which bears the mark, is that of its groups.
IN_THE_GUEST = ("vm/",)
ANYWHERE = ("architecture/", "unit/", "cri/images/", "cri/rpc/", "cri/streaming/", "cri/test_")

Item = TypeVar("Item")


def worker(config: Any) -> int:
    """Return the number of this worker, from 1 on; 0 where there are none, and in the process that
    gives them their work."""
    words: dict[str, str] = getattr(config, "workerinput", {})
    return int(words["workerid"].removeprefix("gw")) + 1 if words else 0


def unit_of(path: str) -> str:
    """What runs in one piece with the test at this path (`tests/…`, maybe with `::` and a name): a
    name, or the file's path."""
    file = path.partition("::")[0]
    below = file.removeprefix("tests/")
    if below.startswith(IN_THE_GUEST):
        return GUEST
    return file if below.startswith(ANYWHERE) else MACHINE


def in_order(items: Sequence[Item], paths: Sequence[str]) -> list[Item]:
    """The longest units first, so that each begins on its own worker; else as they were."""
    ranks = {GUEST: 0, MACHINE: 1}
    pairs = zip(items, paths, strict=True)
    return [item for item, _ in sorted(pairs, key=lambda pair: ranks.get(unit_of(pair[1]), 2))]


def scheduler(config: Any, log: Any) -> Any:
    """xdist's for scopes, with these units as scopes, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)
