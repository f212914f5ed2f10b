"""Lowers a plan to the launcher's program. Each operation becomes a few system calls with their
data, and with jumps to other calls after certain errnos.

The named descriptors of the plan get consecutive numbers, above stdio and the descriptors that the
caller passes on (`preserve`). The numbers are the same in every run, so a program can be stored.

Paths below the container's root are resolved beneath the root's descriptor, missing folders are
created one component at a time, and mounts go from descriptor to descriptor. So a symbolic link in
an image, or one that is swapped in during the start, cannot lead outside (runc's CVE-2021-30465,
CVE-2024-45310, CVE-2025-31133, CVE-2025-52565).
"""

from __future__ import annotations

from pyrunc.plan import lower_mount, lower_process
from pyrunc.plan.lowering import ROOT_NUMBER, Lowering
from pyrunc.plan.lowering_cache import LoweringCache, PlanAssembler, PlanLine
from pyrunc.plan.model import LoadFilter, Ready, steps_of
from pyrunc.program.model import TIME, LoweredProgram

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from pyrunc.plan.model import Op, Plan

CLOCK_REALTIME = 0


def lower(plan: Plan, *, arch: str = "", timed: bool = False) -> LoweredProgram:
    """Lower a plan to a program for one architecture (`uname -m`; default: this machine's).

    `timed`: the program sends a TIME message after each operation before the first `LoadFilter` or
    `Ready`. Once loaded, a filter may refuse clock_gettime(2).
    """
    ops = plan.ops
    preserve = sum(getattr(op, "preserve", 0) for op in ops)
    numbers = _number_descriptors(ops, 3 + preserve)
    cache = _cache(arch)
    fragments = {}
    # A timed program sends a message after each operation; fragments have no such messages.
    if numbers.get("root", ROOT_NUMBER) == ROOT_NUMBER and not timed:
        fragments = cache.fragments(ops, CALLS)
    low = cache.start(numbers)
    low.preserve = preserve
    index, size = 0, len(ops)
    while index < size:
        if index in fragments:
            length, fragment = fragments[index]
            lines = [PlanLine(ops[i], i + 1) for i in range(index, index + length)]
            low.a.append_fragment(fragment, lines)
            index += length
        else:
            low.line = index + 1
            low.a.at(PlanLine(ops[index], low.line))
            CALLS[type(ops[index])](low, ops[index])
            timed = timed and not isinstance(ops[index], LAST_TIMED)
            if timed:
                _send_time(low)
            index += 1
    waits = enumerate(map(steps_of, ops), 1)
    steps = {number: steps for number, steps in waits if steps}
    return LoweredProgram(low.a.program(), numbers, steps)


LAST_TIMED = (LoadFilter, Ready)


def _send_time(low: Lowering) -> None:
    """Emit the calls that send the parent a TIME message: the seconds and nanoseconds of
    CLOCK_REALTIME."""
    now = low.a.data(16)
    # A time namespace shifts CLOCK_MONOTONIC and CLOCK_MONOTONIC_RAW (time_namespaces(7)).
    low.a.sys("clock_gettime", CLOCK_REALTIME, now)
    low.a.send(TIME, low.a.field(now, 0, 8), low.a.field(now, 8, 8))


_caches: dict[str, LoweringCache] = {}


def _cache(arch: str) -> LoweringCache:
    if arch not in _caches:
        _caches[arch] = LoweringCache(Lowering(PlanAssembler(arch), {"root": ROOT_NUMBER}))
    return _caches[arch]


def _number_descriptors(ops: Iterable[Op], first: int) -> dict[str, int]:
    """Return a dict: name -> number, for all descriptors that the operations name. The numbers are
    consecutive from `first` on; the root gets the first one."""
    names: dict[str, None] = {}
    for op in ops:
        for name in NEEDS.get(type(op), _none)(op):
            names[name] = None
    # First, so that its number is the same in all plans: fragments of the cache refer to it.
    if "root" in names:
        names = {"root": None, **names}
    return {name: first + i for i, name in enumerate(names)}


def _none(op: Any) -> tuple[str, ...]:
    return ()


CALLS: dict[type, Callable[[Lowering, Any], None]] = {**lower_mount.CALLS, **lower_process.CALLS}
NEEDS: dict[type, Callable[[Any], tuple[str, ...]]] = {**lower_mount.NEEDS, **lower_process.NEEDS}
