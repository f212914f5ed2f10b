"""Builds the first instructions of a filter. They answer ENOSYS, not the default errno, to system
calls that are newer than the profile, as runc's filters do since 1.0.

A C library may try a new system call before the old one. After ENOSYS it makes the old call; after
EPERM it fails. So calls above the highest number that the profile names answer ENOSYS. The first
instructions also decide about calls whose names an old libseccomp does not know. They compare
numbers: from 424 on, these are the same on every architecture. The instructions are classic BPF,
see seccomp(2) and Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import errno
import struct

from pyrunc.seccomp.profile import AARCH64, ALLOW, ARM, ERRNO, LOG, TRACE, X32, X86, X86_64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

INSTRUCTION = struct.Struct("<HBBI")
LOAD = 0x20
JUMP = 0x05
JUMP_EQUAL = 0x15
JUMP_GREATER = 0x25
JUMP_GREATER_OR_EQUAL = 0x35
RETURN = 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
SOCKETCALL = 102  # of i386
X32_BIT = 0x40000000
TAKES_RECENT = (ALLOW, LOG, TRACE)

COMMON_NUMBERS = (X86_64, X86, X32, ARM, AARCH64)

Instruction = tuple[int, int, int, int]  # opcode, jump if true, jump if false, operand


def is_needed(default_action: int) -> bool:
    """Return whether calls that are newer than the profile must get ENOSYS. False if the default
    action is ALLOW, LOG or TRACE."""
    return default_action & 0x7FFF0000 not in TAKES_RECENT


def prologue(highest: Mapping[int, int], verdicts: Mapping[int, int], with_enosys: bool) -> bytes:
    """Build the beginning of a filter. It answers:

    - the action of each call number in `verdicts`
    - with `with_enosys`, ENOSYS above the highest number that the profile names (`highest`, per
      architecture)

    All other calls go on to the filter that follows, which must load the number again.
    """
    code: list[Instruction] = []
    for audit in reversed([audit for audit in highest if audit != X32]):
        block = _number_rules(
            highest[audit], verdicts if audit in COMMON_NUMBERS else {}, with_enosys, 0
        )
        if audit == X86_64:
            block = _split_off_x32(block, highest, verdicts, with_enosys)
        if block:
            # A jump with 32 bits (BPF_JA): the rest may be longer than the 255 instructions of a
            # conditional one.
            block = [(LOAD, 0, 0, NUMBER_AT), *block, (JUMP, 0, 0, len(code))]
            code = [(JUMP_EQUAL, 0, len(block), audit), *block, *code]
    if code:
        code.insert(0, (LOAD, 0, 0, ARCHITECTURE_AT))
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)


def multiplexed(verdicts: Mapping[int, int]) -> bytes:
    """Build the beginning of a filter that decides about i386's socketcall(2) by its first
    argument, which is the number of a socket call. `verdicts`: this number -> action.

    libseccomp cannot do this. It allows a socket call as soon as any rule allows it, whatever the
    rule says of arguments, and no rule for socketcall(2) can override that.
    """
    if not verdicts:
        return b""
    judge: list[Instruction] = []
    for value, action in sorted(verdicts.items()):
        judge += [(JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, action)]
    judge = [
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_EQUAL, 0, len(judge) + 1, SOCKETCALL),
        (LOAD, 0, 0, ARGUMENTS_AT),
        *judge,
    ]
    code = [(LOAD, 0, 0, ARCHITECTURE_AT), (JUMP_EQUAL, 0, len(judge), X86), *judge]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)


def _split_off_x32(
    block: list[Instruction],
    highest: Mapping[int, int],
    verdicts: Mapping[int, int],
    with_enosys: bool,
) -> list[Instruction]:
    """Put rules for x32 calls before `block`; x32 calls then skip `block`. An x32 call has the
    architecture x86_64 and X32_BIT in its number.

    If the profile does not list x32, there are no such rules, and the filter that follows the
    prologue decides about x32 calls.
    """
    x32 = _number_rules(highest[X32], verdicts, with_enosys, X32_BIT) if X32 in highest else []
    if not block and not x32:
        return []
    return [
        (JUMP_GREATER_OR_EQUAL, 0, len(x32) + 1, X32_BIT),
        *x32,
        (JUMP, 0, 0, len(block)),
        *block,
    ]


def _number_rules(
    highest: int, verdicts: Mapping[int, int], with_enosys: bool, bit: int
) -> list[Instruction]:
    """Build the instructions for one architecture. They answer the actions in `verdicts` and, with
    `with_enosys`, ENOSYS above `highest`. All other numbers go on to the following instructions.
    `bit`: X32_BIT for x32 calls, whose numbers contain it; otherwise 0."""
    body: list[Instruction] = []
    for number, action in sorted(verdicts.items()):
        body += [(JUMP_EQUAL, 0, 1, number | bit), (RETURN, 0, 0, action)]
    if with_enosys:
        top = max([highest, *(number | bit for number in verdicts)])
        body += [(JUMP_GREATER, 0, 1, top), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    if verdicts:
        # Most calls are below all of these numbers, and pass them by in one comparison.
        body.insert(0, (JUMP_GREATER_OR_EQUAL, 0, len(body), min(verdicts) | bit))
    return body
