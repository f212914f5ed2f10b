"""Makes a filter shorter without changing its results. For each architecture the shorter filter has
one binary tree over intervals of call numbers, with the actions at the leaves.

A shorter filter is installed faster: the kernel checks and compiles every instruction, and runs the
filter once per call number. libseccomp compares number by number, also in its binary tree. But most
neighbouring numbers have the same action, so there are few intervals. They are computed by running
libseccomp's filter with a range of numbers instead of one number. Calls whose action depends on
their arguments stay in a filter of libseccomp, to which the tree jumps.
"""

from __future__ import annotations

from pyrunc.seccomp.stub import (
    ARCHITECTURE_AT,
    INSTRUCTION,
    JUMP,
    LOAD,
    NUMBER_AT,
    RETURN,
    Instruction,
)
from pyrunc.seccomp.stub import JUMP_EQUAL as EQUAL
from pyrunc.seccomp.stub import JUMP_GREATER as GREATER
from pyrunc.seccomp.stub import JUMP_GREATER_OR_EQUAL as GREATER_OR_EQUAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LAST_NUMBER = 0xFFFFFFFF
NO_ARCHITECTURE = 0xFFFFFFFF
# jt and jf of struct sock_filter have 8 bits; BPF_JA has 32.
FARTHEST_JUMP = 255
X32_SHARES = {0x4000003E: 0xC000003E}  # x32 calls carry x86-64's architecture

# first number, last number, action; None: the action depends on more than the number
Interval = tuple[int, int, int | None]
TO_REST: Instruction = (0xFFFF, 0, 0, 0)


def flatten(program: bytes, rest: bytes, architectures: Sequence[int]) -> bytes:
    """Return a filter with the same results as the filter `program`, and mostly fewer instructions.
    The result is a tree that looks up the call's number, followed by the filter `rest`. The tree
    jumps to `rest` for calls whose action depends on their arguments. `architectures`: AUDIT_ARCH
    values."""
    audits = list(dict.fromkeys(X32_SHARES.get(audit, audit) for audit in architectures))
    # RuntimeDefault has 639 instructions in this form and takes 0.16 ms to install; libseccomp's
    # has 1312, and takes 0.32.
    trees = [[(LOAD, 0, 0, NUMBER_AT), *_tree(intervals(program, audit))] for audit in audits]
    code: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE_AT)]
    # up to the first tree: the rest of the dispatch, and the action for other architectures
    skipped = 2 * len(audits) - 1 + 1
    for audit, tree in zip(audits, trees, strict=True):
        code += [(EQUAL, 0, 1, audit), (JUMP, 0, 0, skipped - 1)]
        skipped += len(tree) - 2
    ((_, _, foreign),) = intervals(program, NO_ARCHITECTURE)
    code += [TO_REST if foreign is None else (RETURN, 0, 0, foreign)]
    for tree in trees:
        code += tree
    return b"".join(_encode(item, at, len(code)) for at, item in enumerate(code)) + rest


def _encode(item: Instruction, at: int, rest_at: int) -> bytes:
    return INSTRUCTION.pack(*((JUMP, 0, 0, rest_at - at - 1) if item is TO_REST else item))


def _tree(parts: Sequence[Interval]) -> list[Instruction]:
    """Build a tree of comparisons over the intervals. Each leaf returns an action, or jumps to the
    filter that follows the tree."""
    if len(parts) == 1:
        action = parts[0][2]
        return [TO_REST if action is None else (RETURN, 0, 0, action)]
    middle = len(parts) // 2
    low, high, border = _tree(parts[:middle]), _tree(parts[middle:]), parts[middle][0]
    if len(low) <= FARTHEST_JUMP:
        return [(GREATER_OR_EQUAL, len(low), 0, border), *low, *high]
    return [(GREATER_OR_EQUAL, 0, 1, border), (JUMP, 0, 0, len(low)), *low, *high]


def intervals(program: bytes, audit: int) -> list[Interval]:
    """Divide all system call numbers into intervals, in ascending order. The filter `program` has
    the same action for all numbers of an interval. `audit`: the architecture (AUDIT_ARCH_*)."""
    code = [INSTRUCTION.unpack_from(program, at) for at in range(0, len(program), INSTRUCTION.size)]
    parts: list[Interval] = []
    # index of an instruction, range of numbers that get there, offset that was loaded last
    pending = [(0, 0, LAST_NUMBER, -1)]
    while pending:
        at, first, last, loaded = pending.pop()
        if first > last:
            continue
        opcode, if_true, if_false, value = code[at]
        if opcode == LOAD and value in (NUMBER_AT, ARCHITECTURE_AT):
            pending.append((at + 1, first, last, value))
        elif opcode == RETURN:
            parts.append((first, last, value))
        elif opcode == JUMP:
            pending.append((at + 1 + value, first, last, loaded))
        elif opcode in (EQUAL, GREATER, GREATER_OR_EQUAL) and loaded >= 0:
            yes, no = at + 1 + if_true, at + 1 + if_false
            if loaded == ARCHITECTURE_AT:
                pending.append((yes if _holds(opcode, audit, value) else no, first, last, loaded))
            else:
                pending += [(*part, loaded) for part in _split(opcode, value, first, last, yes, no)]
        else:
            parts.append((first, last, None))
    return _merge_neighbours(sorted(parts, key=lambda part: part[0]))


def _holds(opcode: int, left: int, right: int) -> bool:
    return (
        left == right if opcode == EQUAL else left > right if opcode == GREATER else left >= right
    )


def _split(
    opcode: int, value: int, first: int, last: int, yes: int, no: int
) -> list[tuple[int, int, int]]:
    """Split the call numbers `first` to `last` at a comparison with `value`. Returns (jump target,
    first, last) for each resulting range; the target is `yes` or `no`. A range is empty if its
    first number is above its last."""
    if opcode == EQUAL:
        inside = first <= value <= last
        if not inside:
            return [(no, first, last)]
        return [(yes, value, value), (no, first, value - 1), (no, value + 1, last)]
    border = value + 1 if opcode == GREATER else value
    return [(yes, max(first, border), last), (no, first, min(last, border - 1))]


def _merge_neighbours(parts: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for first, last, action in parts:
        if merged and merged[-1][2] == action:
            merged[-1] = (merged[-1][0], last, action)
        else:
            merged.append((first, last, action))
    return merged
