"""The elements of a program: addresses in its data, variables, labels; and the finished, checked
program.

A program is a list of operations and one block of data. Nothing in it is a string to be parsed: an
argument is a number, an address in the data, or the content of a slot. The launcher
(`pause/launcher.c`) maps the encoded program privately and stores results into the data. A result
may be stored in the middle of a structure that a later call reads.
"""

from __future__ import annotations

from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyrunc.plan.model import ParentStep

# Operation kinds and argument kinds, as in launcher.c.
SYS, CMP, SET, SEND, WAIT, FAIL, EXIT = 1, 2, 3, 4, 5, 6, 7
IMMEDIATE, ADDRESS, LOAD_1, LOAD_4, LOAD_8 = 0, 1, 2, 3, 4
RELATIONS = {"eq": 0, "ne": 1, "lt": 2, "ge": 3}

# Tags of messages. The launcher itself uses the last two; a program may use every other number
# below FIRST_RESERVED.
PID, READY, PROGRESS, DESCRIPTOR, LISTENER, STATUS, TIME = 1, 2, 3, 4, 5, 6, 7
FIRST_RESERVED, REFUSED, FAILURE = 0xFFFFFFF0, 0xFFFFFFFE, 0xFFFFFFFF


class Address:
    """An address in the program's data, passed to a call as a pointer."""

    __slots__ = ("offset",)

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def at(self, offset: int) -> Address:
        """Return the address `offset` bytes further, such as that of a structure's field."""
        return Address(self.offset + offset)


class Slot:
    """A variable of 1, 4 (signed) or 8 bytes in the data. A call that has the slot as an argument
    gets its content."""

    __slots__ = ("bit", "offset", "width")

    def __init__(self, offset: int, width: int, bit: int = 0) -> None:
        self.offset, self.width, self.bit = offset, width, bit

    @property
    def address(self) -> Address:
        """Return the slot's address, for a call that reads or writes the slot through a pointer."""
        return Address(self.offset)


Operand = int | Slot
Argument = int | bytes | str | Address | Slot


class Label:
    """A position in the list of operations, to which earlier operations can jump. Every jump goes
    forward."""

    __slots__ = ("index", "name")

    def __init__(self, name: str, index: int = -1) -> None:
        self.name, self.index = name, index


NEXT = Label("next")
"""A jump to this label goes on with the operation that follows."""


class Line:
    """A line of the plan. The error of a failed operation names its line."""

    __slots__ = ("number", "text")

    def __init__(self, text: str, number: int | None = None) -> None:
        self.text, self.number = text, number


class Program(Value):
    """A checked program. It can be run any number of times, because nothing in it depends on
    descriptors or processes.

    - `encoded`: the bytes that the launcher maps (`program.encode`)
    - `calls`: for each operation, the system call's name
    - `lines`: for each operation, the line of the plan
    - `notes`: index of an operation -> error text and kind of failure
    - `pid_op`: index of the operation that sends PID; messages of later operations come from the
      cloned process. None if no operation sends PID.
    """

    encoded: bytes
    calls: Sequence[str] = ()
    lines: Sequence[Line] = ()
    notes: Mapping[int, tuple[str, str]] = {}
    pid_op: int | None = None


class LoweredProgram(Value):
    """A plan's program, and the data that the parent process needs to run it.

    - `numbers`: name of a descriptor -> its number in the program
    - `steps`: line of the plan at which the process waits -> the parent's steps at this line
    """

    program: Program
    numbers: Mapping[str, int]
    steps: Mapping[int, Sequence[ParentStep]] = {}
