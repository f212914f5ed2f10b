"""Converts a failed operation and its errno to an error such as `mount 'proc' on '/proc': EPERM
(move_mount, plan line 17)`."""

from __future__ import annotations

from pyrunc.errors import KernelError
from pyrunc.program.model import Program


class OperationFailed(KernelError):
    """An operation of a program failed.

    - `op_index`: the operation's index
    - `line`: the number of its plan line
    - `mark`: the kind of failure, as passed to `Assembler.fail`
    """

    def __init__(
        self,
        call: str,
        subject: str,
        errno: int,
        note: str,
        op_index: int,
        line: int | None,
        mark: str,
    ) -> None:
        super().__init__(call, subject, errno, note)
        self.op_index, self.line, self.mark = op_index, line, mark


def failure(program: Program, op_index: int, errno: int) -> OperationFailed:
    """Return the error for a failure message of the launcher."""
    if not 0 <= op_index < len(program.calls):
        return OperationFailed("launcher", f"operation {op_index}", errno, "", op_index, None, "")
    line, call = program.lines[op_index], program.calls[op_index]
    note, mark = program.notes.get(op_index, ("", ""))
    verb, _, subject = line.text.partition(" ")
    details = [note] if note else []
    if call and call != verb and verb:
        details.append(call)
    if line.number is not None:
        details.append(f"plan line {line.number}")
    return OperationFailed(
        verb or call or "program",
        subject or ("" if verb else f"operation {op_index}"),
        errno,
        ", ".join(details),
        op_index,
        line.number,
        mark,
    )
