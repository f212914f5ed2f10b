"""Caches lowered operations that are the same in most plans of a machine: default mounts, devices,
masks, capabilities.

Lowering is half of the time that a start spends in Python. A fragment is the lowered code of one or
a few consecutive operations. This code can be moved in a program, because its jumps are relative.
Its data cannot be moved, because calls refer to data by offset. So all fragments share one block of
data. Each program begins its data with a copy of this block, and contains the code of the fragments
that it uses. A process that starts containers fills the cache once, and its forks inherit it.
"""

from __future__ import annotations

from pyrunc.plan import model as m
from pyrunc.plan.lowering import Lowering, SharedSlots
from pyrunc.program.assemble import Assembler
from pyrunc.program.model import Line
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any

    from pyrunc.plan.model import Op

# Each operation of these classes is a fragment by itself. The code of all cached operations depends
# only on the operations and the root's number.
ALONE = frozenset((m.Prepare, m.SetOomScore, m.MountFs))
# Consecutive operations of one group (the number) are one fragment: they share descriptors of
# folders and the mask's tmpfs, and a fragment must not use those of another fragment. Limits and
# identity are mostly the same for all containers.
# DropBounding alone is up to 41 calls, one per capability: prctl(2) has none for a set.
TOGETHER = {
    m.MakeDevice: 1,
    m.Symlink: 1,
    m.ReadonlyPath: 2,
    m.MaskPath: 2,
    m.SetLimit: 3,
    m.DropBounding: 4,
    m.SetGroups: 4,
    m.SetIds: 4,
    m.SetCapabilities: 4,
}
# Every program has a copy of the whole block, so a cache that grows with foreign configurations
# would cost each start.
FRAGMENTS_AT_MOST, DATA_AT_MOST_BYTES = 200, 1 << 16
SEEN_AT_MOST = 1000


class PlanLine(Line):
    """The line of an operation in the plan. The text is built only when the operation fails."""

    __slots__ = ("op",)

    def __init__(self, op: Op, number: int) -> None:
        self.op, self.number = op, number

    @property
    def text(self) -> str:  # type: ignore[override]
        from pyrunc.plan.show import line

        return line(self.op)


class Fragment(Value):
    """The code of consecutive operations of a plan. One operation of the plan becomes several
    operations of the program.

    - `packed`: the bytes of each operation of the program
    - `calls`: for each operation of the program, the name of its system call
    - `places`: for each operation of the program, the operation of the plan from which it was
      made, counted from 0 in the fragment
    - `notes`: index in `packed` -> error text and kind of failure of this operation
    - `data_bytes`: size of the shared data block when the fragment was made
    """

    packed: list[bytes]
    calls: list[str]
    places: list[int]
    notes: dict[int, tuple[str, str]]
    data_bytes: int


class PlanAssembler(Assembler):
    """An assembler whose operations can be cached: `extract` makes a fragment of them, and
    `append_fragment` appends a fragment to a `copy` of the assembler."""

    copied_bytes = 0
    """The size of the data that `copy` has put into this assembler."""

    def extract(self) -> Fragment:
        """Remove all operations from the assembler and return them as a fragment. Their data stays
        in the shared block."""
        for jump in self._jumps:
            # The operation after the fragment is a target, too.
            self._packed[jump.index] = jump.packed(len(self._packed) + 1)
        places = [where.number or 0 for where in self._lines]
        fragment = Fragment(self._packed, self._calls, places, self._notes, len(self._data))
        self._packed = []
        self._calls = []
        self._lines = []
        self._notes = {}
        self._jumps, self._stored_at = [], {}
        return fragment

    def append_fragment(self, fragment: Fragment, lines: Sequence[Line] = ()) -> None:
        """Append a fragment. This assembler must have the fragment's data: it must be a `copy` of
        an assembler that has it.

        `lines[i]` is the line of the i-th plan operation that the fragment was made from. If
        `lines` is empty, the whole fragment belongs to the line that was passed to `at`.
        """
        start = len(self._packed)
        self._packed += fragment.packed
        self._calls += fragment.calls
        if lines:
            self._lines += [lines[place] for place in fragment.places]
        else:
            self._lines += [self._line] * len(fragment.packed)
        for index, note in fragment.notes.items():
            self._notes[start + index] = note
        self._ended = False

    def copy(self) -> PlanAssembler:
        """Return an assembler with the same data and no operations."""
        assembler = PlanAssembler(self.arch.machine)
        assembler._data, assembler._slots = self._data[:], self._slots
        assembler.copied_bytes = len(self._data)
        assembler._relocations = self._relocations[:]
        assembler._strings, assembler._constants = self._strings.copy(), self._constants.copy()
        return assembler

    @property
    def data_bytes(self) -> int:
        return len(self._data)


class LoweringCache:
    """The fragments of one architecture, and the block of data that they share."""

    __slots__ = ("_fragments", "_low", "_seen")

    def __init__(self, low: Lowering) -> None:
        self._low = low
        # With the fragments of the default plan, its lowering takes 0.20 ms in place of 0.89.
        self._fragments: dict[Hashable, Fragment] = {}
        self._seen: set[Hashable] = set()

    @property
    def shared(self) -> SharedSlots:
        """Return the slots of the shared block that fragments use."""
        return self._low.shared

    def start(self, numbers: dict[str, int]) -> Lowering:
        """Return a `Lowering` whose data begins with a copy of the shared block. `numbers`: the
        descriptor number of each name in the plan."""
        return Lowering(self._low.a.copy(), numbers, self)

    def append(
        self, a: PlanAssembler, lower: Callable[..., None], arguments: tuple[Hashable, ...]
    ) -> bool:
        """Append the cached operations of `lower(lowering, *arguments)` to `a`, whose data begins
        with a copy of the shared block. If they are not cached, append nothing and return False.

        The second call with the same arguments caches the operations, unless the cache is full. It
        still returns False, because the copy in `a` is older and lacks their data.
        """
        key = lower, arguments
        fragment = self._fragments.get(key)
        # A fragment that is younger than the copy has data that the copy lacks.
        if fragment is not None and fragment.data_bytes <= a.copied_bytes:
            a.append_fragment(fragment)
            return True
        # Not at the first call: a fragment that is used only once would take room, and be lowered
        # twice.
        if fragment is None and key in self._seen and not self._is_full():
            self._low.forget()
            lower(self._low, *arguments)
            self._low.forget()
            self._fragments[key] = self._low.a.extract()
        elif len(self._seen) < SEEN_AT_MOST:
            self._seen.add(key)
        return False

    def fragments(
        self, ops: tuple[Op, ...], calls: dict[type, Callable[[Lowering, Any], None]]
    ) -> dict[int, tuple[int, Fragment]]:
        """Return the fragments of a plan as a dict: index in `ops` of the first operation ->
        (number of operations that the fragment replaces, fragment). Makes and caches missing
        fragments until the cache is full.

        `calls`: class of an operation -> function that lowers it.
        """
        by_start = {}
        for start, end in _spans(ops):
            key = ops[start:end]
            fragment = self._fragments.get(key)
            if fragment is None:
                if self._is_full():
                    continue
                fragment = self._fragments[key] = self._make(key, calls)
            by_start[start] = (end - start, fragment)
        return by_start

    def _is_full(self) -> bool:
        too_many = len(self._fragments) >= FRAGMENTS_AT_MOST
        return too_many or self._low.a.data_bytes > DATA_AT_MOST_BYTES

    def _make(
        self, ops: tuple[Op, ...], calls: dict[type, Callable[[Lowering, Any], None]]
    ) -> Fragment:
        low = self._low
        low.forget()
        for place, op in enumerate(ops):
            low.a.at(PlanLine(op, place))
            calls[type(op)](low, op)
        low.forget()
        return low.a.extract()


def _spans(ops: tuple[Op, ...]) -> list[tuple[int, int]]:
    """Return (begin, end) indices in `ops` for each run of operations that becomes one fragment.
    Other operations are not cached."""
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
