"""The plan lowered to the launcher's program: each operation becomes a few system calls, their data and their error rules.

Descriptors that the plan names get numbers above stdio, the same in every run of the program, so a program can be kept.
Nothing below the container's root is ever a path for the kernel to follow freely: everything is resolved beneath the root's
descriptor, created part by part, and mounted from descriptor to descriptor (oci-runtime CVE classes 2021-30465, 2024-45310,
2025-31133, 2025-52565).
"""

from __future__ import annotations

from pyrunc.plan import lower_mount, lower_process
from pyrunc.plan.lowering import Lowering
from pyrunc.plan.show import line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from pyrunc.plan.model import Op, Plan
    from pyrunc.program.model import Program


class Lowered:
    """`program` to launch, with `numbers`: which descriptor (by name) it expects on which number."""

    __slots__ = ("numbers", "program")

    def __init__(self, program: Program, numbers: dict[str, int]) -> None:
        self.program, self.numbers = program, numbers


def lower(plan: Plan, *, arch: str = "") -> Lowered:
    """The program of a plan for one architecture (`uname -m`; this machine's without one)."""
    numbers = _numbers(plan.ops)
    low = Lowering(arch, numbers)
    low.preserve = sum(getattr(op, "preserve", 0) for op in plan.ops)
    for number, op in enumerate(plan.ops, 1):
        with low.a.line(line(op), number):
            CALLS[type(op)](low, op)
    return Lowered(low.a.program(), numbers)


def _numbers(ops: Iterable[Op]) -> dict[str, int]:
    """Numbers from 3 (above what is preserved) for every descriptor that the operations name."""
    names: dict[str, None] = {}
    first = 3
    for op in ops:
        first += getattr(op, "preserve", 0)
        for name in NEEDS.get(type(op), _none)(op):
            names[name] = None
    return {name: first + i for i, name in enumerate(names)}


def _none(op: Any) -> tuple[str, ...]:
    return ()


CALLS: dict[type, Callable[[Lowering, Any], None]] = {**lower_mount.CALLS, **lower_process.CALLS}
NEEDS: dict[type, Callable[[Any], tuple[str, ...]]] = {**lower_mount.NEEDS, **lower_process.NEEDS}
