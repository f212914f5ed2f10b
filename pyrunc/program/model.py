"""Parts of a program: places in its data, labels, and the finished, proved program.

A program is a list of operations and one block of data. Nothing in it is a string to be parsed: an
argument is a number, an address in the data, or the content of a slot. The launcher
(`pause/launcher.c`) maps the encoded program privately, so results are stored into the data, also
in the middle of a structure that a later call reads.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Operation kinds and argument kinds, as in launcher.c.
SYS, CMP, SET, SEND, WAIT, FAIL, EXIT = 1, 2, 3, 4, 5, 6, 7
IMMEDIATE, ADDRESS, LOAD_1, LOAD_4, LOAD_8 = 0, 1, 2, 3, 4
RELATIONS = {"eq": 0, "ne": 1, "lt": 2, "ge": 3}

# Tags of messages. The launcher itself uses the last two; a program may use every other number
# below FIRST_RESERVED.
PID, READY, PROGRESS, DESCRIPTOR, LISTENER, STATUS, TIME = 1, 2, 3, 4, 5, 6, 7
FIRST_RESERVED, REFUSED, FAILURE = 0xFFFFFFF0, 0xFFFFFFFE, 0xFFFFFFFF


class Address:
    """A place in the program's data, passed to a call as a pointer."""

    __slots__ = ("offset",)

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def at(self, offset: int) -> Address:
        """Return the place `offset` bytes further: a field of a structure."""
        return Address(self.offset + offset)


class Slot:
    """A variable of 1, 4 (signed) or 8 bytes in the data. As an argument it is loaded when the
    operation runs."""

    __slots__ = ("bit", "offset", "width")

    def __init__(self, offset: int, width: int, bit: int = 0) -> None:
        self.offset, self.width, self.bit = offset, width, bit

    @property
    def address(self) -> Address:
        """The slot's place, for a call that writes into it or reads it through a pointer."""
        return Address(self.offset)


Operand = int | Slot
Argument = int | bytes | str | Address | Slot


class Label:
    """A place in the list of operations, the target of jumps from earlier operations: every jump
    goes forward."""

    __slots__ = ("index", "name")

    def __init__(self, name: str, index: int = -1) -> None:
        self.name, self.index = name, index


NEXT = Label("next")
"""As the target of an error rule: go on with the operation that follows."""


class Line:
    """The plan line that operations belong to, for the errors of their failures."""

    __slots__ = ("mark", "number", "text")

    def __init__(self, text: str, number: int | None = None, mark: str = "") -> None:
        self.text, self.number, self.mark = text, number, mark


class Program:
    """A proved program, which can be run any number of times: nothing in it depends on
    descriptors or processes."""

    __slots__ = ("_encoded", "arch", "calls", "lines", "notes", "pid_op")

    def __init__(
        self,
        encoded: bytes,
        arch: str,
        calls: Sequence[str],
        lines: Sequence[Line],
        notes: dict[int, tuple[str, str]],
        pid_op: int | None = None,
    ) -> None:
        self._encoded = encoded
        self.arch = arch
        self.calls = calls
        self.lines = lines
        self.notes = notes
        self.pid_op = pid_op
        """The operation that sends PID, if one does: the cloned process runs what comes after
        it."""

    def __len__(self) -> int:
        return len(self.calls)

    def encode(self) -> bytes:
        """Return the bytes that the launcher maps; the layout is in `program.encode`."""
        return self._encoded

    def open_image(self) -> int:
        """Open a memfd with the encoded program for the launcher, which the caller closes.
        Raises KernelError."""
        from pyrunc.kernel.fd import open_memfd

        return open_memfd("pyrunc:program", self._encoded)

    def explain(self, op_index: int) -> str:
        """Describe one operation for a person: `mount 'proc' on '/proc' (move_mount, plan line
        17)`."""
        if not 0 <= op_index < len(self.calls):
            return f"operation {op_index}"
        line, call = self.lines[op_index], self.calls[op_index]
        details = [call] if call and call != line.text.partition(" ")[0] else []
        if line.number is not None:
            details.append(f"plan line {line.number}")
        text = line.text or f"operation {op_index}"
        return f"{text} ({', '.join(details)})" if details else text
