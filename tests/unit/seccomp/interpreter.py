"""An interpreter of classic BPF, with which tests run seccomp filters as the kernel does."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pyrunc.seccomp.profile import X86_64

DATA = struct.Struct("<IIQ6Q")
INSTRUCTION = struct.Struct("<HBBI")


def run(
    program: bytes, number: int, arguments: Sequence[int] = (), architecture: int = X86_64
) -> int:
    """Return the filter's action for one system call."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = DATA.pack(number & 0xFFFFFFFF, architecture, 0, *values)
    accumulator, at = 0, 0
    while True:
        opcode, if_true, if_false, operand = INSTRUCTION.unpack_from(program, at * 8)
        at += 1
        if opcode == 0x20:  # ld [k]
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif opcode == 0x06:  # ret
            return int(operand)
        elif opcode == 0x05:  # ja
            at += operand
        elif opcode == 0x54:  # and
            accumulator &= operand
        else:
            taken = {0x15: accumulator == operand, 0x25: accumulator > operand,
                0x35: accumulator >= operand,
                     0x45: bool(accumulator & operand)}[opcode]  # fmt: skip
            at += if_true if taken else if_false
