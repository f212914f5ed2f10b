"""A program that another process of ours has made: its image as a descriptor, its words in another, read only when they are needed."""

from __future__ import annotations

import os

from pyrunc import ipc, jsontext
from pyrunc.program.model import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.program.model import Program


def words_of(program: Program) -> bytes:
    """What a failure is worded with: each operation's call and plan line, and the notes."""
    lines: dict[int, tuple[int, list[object]]] = {}
    at = []
    for line in program.lines:
        found = lines.get(id(line))
        if found is None:
            found = lines[id(line)] = len(lines), [line.text, line.number, line.mark]
        at.append(found[0])
    words = {
        "calls": list(program.calls),
        "at": at,
        "lines": [line for _, line in lines.values()],
        "notes": {str(number): list(note) for number, note in program.notes.items()},
    }
    return jsontext.dumps(words).encode("ascii")


class ReceivedProgram:
    """What `program.model.Program` is to who launches it. Owns `image`, a memfd with the encoded program, and `words`."""

    __slots__ = ("_calls", "_image", "_lines", "_notes", "_words", "arch", "pid_op")

    def __init__(self, image: int, words: int, pid_op: int | None) -> None:
        self._image, self._words, self.pid_op, self.arch = image, words, pid_op, ""
        self._lines: list[Line] | None = None
        self._calls: list[str] = []
        self._notes: dict[int, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def calls(self) -> Sequence[str]:
        self._read()
        return self._calls

    @property
    def lines(self) -> Sequence[Line]:
        return self._read()

    @property
    def notes(self) -> dict[int, tuple[str, str]]:
        self._read()
        return self._notes

    def open_image(self) -> int:
        """A descriptor of the encoded program for the launcher, the caller's to close."""
        return os.dup(self._image)

    def explain(self, op_index: int) -> str:
        """As `Program.explain`."""
        from pyrunc.program.model import Program

        return Program(b"", self.arch, self.calls, self.lines, self.notes, self.pid_op).explain(op_index)

    def close(self) -> None:
        """Nobody will start it again."""
        os.close(self._image)
        os.close(self._words)

    def _read(self) -> list[Line]:
        if self._lines is None:
            words = jsontext.loads(ipc.read_memory(self._words))
            lines = [Line(text, number, mark) for text, number, mark in words["lines"]]
            self._lines = [lines[n] for n in words["at"]]
            self._calls = words["calls"]
            self._notes = {int(number): (note, mark) for number, (note, mark) in words["notes"].items()}
        return self._lines
