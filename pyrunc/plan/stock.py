"""Runs of operations that come again in every plan of a machine, lowered once: default mounts,
devices, masks, capabilities.

Lowering is half of what a start costs its caller in Python. Code of a program can be moved, for
skips are relative, but not its data, to which calls point by offset. So all that is kept shares one
block of data with which every program begins: a program takes a copy of the block and the code of
the runs that it has. A process that starts containers does this once and its forks inherit it.
"""

from __future__ import annotations

from pyrunc.plan import model as m
from pyrunc.program.assemble import Assembler
from pyrunc.program.model import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.plan.lowering import Lowering
    from pyrunc.plan.model import Op

# Operations that depend on nothing but themselves and the root's number, each a run of its own or
# with its neighbours.
ALONE = frozenset((m.Prepare, m.MountFs, m.DropBounding))
TOGETHER = {m.MakeDevice: 1, m.Symlink: 1, m.ReadonlyPath: 2, m.MaskPath: 2}
ROOT_NUMBER = 3
RUNS_AT_MOST, DATA_AT_MOST_BYTES = 200, 1 << 16


class PlanLine(Line):
    """An operation's line, worded when somebody asks: that is when it failed."""

    __slots__ = ("op",)

    def __init__(self, op: Op | None, number: int) -> None:
        self.op, self.number, self.mark = op, number, ""

    @property
    def text(self) -> str:  # type: ignore[override]
        if self.op is None:
            return ""
        from pyrunc.plan.show import line

        return line(self.op)


class Run:
    """The code of consecutive operations; `places` has for each call which of the operations it
    belongs to."""

    __slots__ = ("calls", "notes", "packed", "places")

    def __init__(
        self,
        packed: list[bytes],
        calls: list[str],
        places: list[int],
        notes: dict[int, tuple[str, str]],
    ) -> None:
        self.packed = packed
        self.calls = calls
        self.places = places
        self.notes = notes


class PlanAssembler(Assembler):
    """An assembler whose operations can be cut out as a run, and put into a copy of it."""

    def at(self, where: PlanLine) -> None:
        """What follows belongs to this line."""
        self._line = where

    def cut(self) -> Run:
        """All operations so far, as a run; the data stays."""
        for jump in self._jumps:
            self._packed[jump.index] = jump.packed(
                len(self._packed) + 1
            )  # the operation after the run is a target too
        run = Run(
            self._packed, self._calls, [where.number or 0 for where in self._lines], self._notes
        )
        self._packed = []
        self._calls = []
        self._lines = []
        self._notes = {}
        self._jumps, self._stored_at = [], {}
        return run

    def graft(self, run: Run, lines: Sequence[PlanLine]) -> None:
        """Append the operations of a run that was cut out of what this is a copy of."""
        start = len(self._packed)
        self._packed += run.packed
        self._calls += run.calls
        self._lines += [lines[place] for place in run.places]
        for index, note in run.notes.items():
            self._notes[start + index] = note
        self._ended = False

    def copy(self) -> PlanAssembler:
        """One with the same data and no operations."""
        made = PlanAssembler(self.arch.machine)
        made._data, made._slots = self._data[:], self._slots
        made._relocations = self._relocations[:]
        made._strings, made._constants = self._strings.copy(), self._constants.copy()
        return made

    @property
    def data_bytes(self) -> int:
        return len(self._data)


class Stock:
    """What is kept for one architecture."""

    __slots__ = ("_low", "_runs")

    def __init__(self, low: Lowering) -> None:
        self._low = low
        self._runs: dict[tuple[Op, ...], Run] = {}
        low.scratch  # noqa: B018 (shared by all: it must be in the block before the first copy)

    def start(self, lowering: type[Lowering], numbers: dict[str, int]) -> Lowering:
        """A lowering that begins with a copy of the block."""
        return lowering(self._low.a.copy(), numbers, self._low.scratch)

    def runs(
        self, ops: tuple[Op, ...], calls: dict[type, Callable[[Lowering, Any], None]]
    ) -> dict[int, tuple[int, Run]]:
        """Index in `ops` -> length and code, for each run of the plan that is kept; new ones are,
        as long as there is room."""
        found = {}
        for start, end in _spans(ops):
            key = ops[start:end]
            run = self._runs.get(key)
            if run is None:
                if len(self._runs) >= RUNS_AT_MOST or self._low.a.data_bytes > DATA_AT_MOST_BYTES:
                    continue
                run = self._runs[key] = self._make(key, calls)
            found[start] = (end - start, run)
        return found

    def _make(self, ops: tuple[Op, ...], calls: dict[type, Callable[[Lowering, Any], None]]) -> Run:
        low = self._low
        low.forget()
        for place, op in enumerate(ops):
            low.a.at(PlanLine(op, place))
            calls[type(op)](low, op)
        low.forget()
        return low.a.cut()


def _spans(ops: tuple[Op, ...]) -> list[tuple[int, int]]:
    """Where runs begin and end."""
    spans, index, size = [], 0, len(ops)
    while index < size:
        kind, end = type(ops[index]), index + 1
        if kind in ALONE:
            spans.append((index, end))
        elif kind in TOGETHER:
            group = TOGETHER[kind]
            while end < size and TOGETHER.get(type(ops[end])) == group:
                end += 1
            spans.append((index, end))
        index = end
    return spans
