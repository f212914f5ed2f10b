"""The assembler: calls by name, labels instead of counted skips, and a proof that the program cannot go wrong by itself.

    a = Assembler()
    root = a.slot()
    with a.line("mount 'proc' on '/proc'", 17):
        a.sys("openat", -100, "/proc", O_PATH, 0, store=root)
        a.sys("mkdirat", root, "sub", 0o755, skip={EEXIST: NEXT})
    program = a.program()

`program()` proves that every jump goes forward and lands inside and that no slot is loaded on a path on which nothing was
stored in it. A call whose error has no rule ends the program with a failure that names the operation and the errno.
"""

from __future__ import annotations

import errno as _errno
from struct import pack

from pyrunc.abi.arch import arch as _arch
from pyrunc.errors import InvalidArgument, Unsupported
from pyrunc.program import encode as _encode
from pyrunc.program.model import (
    ADDRESS,
    CMP,
    EXIT,
    FAIL,
    FIRST_RESERVED,
    LOAD_1,
    LOAD_4,
    LOAD_8,
    NEXT,
    PID,
    RELATIONS,
    SEND,
    SET,
    SYS,
    WAIT,
    Address,
    Argument,
    Label,
    Line,
    Operand,
    Program,
    Slot,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["NEXT", "Address", "Argument", "Assembler", "Label", "Line", "Operand", "Program", "Slot"]

_WORD = (1 << 64) - 1
_LOADS = {1: LOAD_1, 4: LOAD_4, 8: LOAD_8}
_NO_RULES: tuple[tuple[int, Label], ...] = ()
_RULES_AT_MOST = 3


class _Operation:
    """One operation before its jumps are counted."""

    __slots__ = (
        "call", "dst", "false", "kind", "kinds", "line", "loads", "number", "relation", "retry", "rules", "stores",
        "true", "width", "words",
    )  # fmt: skip

    def __init__(self, kind: int, number: int, call: str, line: Line) -> None:
        self.kind, self.number, self.call, self.line = kind, number, call, line
        self.width = self.relation = self.dst = self.kinds = self.loads = self.stores = 0
        self.words: list[int] = []
        self.rules: Sequence[tuple[int, Label]] = _NO_RULES
        self.retry = (0, 0)
        self.true = self.false = NEXT


class _LineScope:
    __slots__ = ("assembler", "before", "line")

    def __init__(self, assembler: Assembler, line: Line) -> None:
        self.assembler, self.line = assembler, line

    def __enter__(self) -> None:
        self.before, self.assembler._line = self.assembler._line, self.line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.assembler._line = self.before


class Assembler:
    """Collects operations and data for one architecture (`uname -m` name; without one, this machine's).

    Operations are appended in the order of the calls. `sync` is the slot that holds the number of the synchronisation
    socket when the program runs: for close-on-exec, keep lists and messages with descriptors.
    """

    def __init__(self, arch: str = "") -> None:
        self.arch = _arch(arch)
        self._operations: list[_Operation] = []
        self._data = bytearray(8)
        self._relocations: list[int] = []
        self._strings: dict[bytes, int] = {}
        self._slots = 0
        self._line = Line("")
        self._pid_op: int | None = None
        self._notes: dict[int, tuple[str, str]] = {}
        self.sync = Slot(0, 4)

    # ---- data

    def data(self, content: bytes | int, align: int = 8) -> Address:
        """A block of the data: the bytes given, or that many bytes of zero. The program may write into it."""
        if pad := -len(self._data) % align:
            self._data += bytes(pad)
        address = Address(len(self._data))
        self._data += bytes(content) if isinstance(content, int) else content
        return address

    def string(self, text: str | bytes) -> Address:
        """A NUL-terminated string; equal strings share one place, so the program must not write into it."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        offset = self._strings.get(raw)
        if offset is None:
            if b"\0" in raw:
                raise InvalidArgument(f"a NUL character in {raw!r}")
            offset = self._strings[raw] = len(self._data)
            self._data += raw + b"\0"
        return Address(offset)

    def pointers(self, items: Sequence[bytes | str | Address]) -> Address:
        """An array of pointers that ends in NULL: argv, envp. Items that are text become strings."""
        places = [i.offset if isinstance(i, Address) else self.string(i).offset for i in items]
        table = self.data(pack(f"<{len(places) + 1}Q", *places, 0))
        self._relocations.extend(range(table.offset, table.offset + 8 * len(places), 8))
        return table

    def pointer(self, place: Address, target: Address) -> None:
        """Makes the 8 aligned bytes at `place` a pointer to `target`: iovec, msghdr, sock_fprog."""
        if place.offset % 8:
            raise InvalidArgument(f"a pointer at data offset {place.offset}, which is not a multiple of 8")
        self._data[place.offset : place.offset + 8] = pack("<Q", target.offset)
        self._relocations.append(place.offset)

    def slot(self, width: int = 8, initial: int | None = None) -> Slot:
        """A variable of `width` 1, 4 or 8 bytes. Without `initial` it must be stored into before it is loaded.

        Use width 4 for what a call returns as int (descriptors, pids), 8 otherwise; a load of 1 byte is unsigned.
        """
        if width not in _LOADS:
            raise InvalidArgument(f"a slot of {width} bytes")
        place = self.data((initial or 0).to_bytes(width, "little", signed=(initial or 0) < 0), width)
        if initial is not None:
            return Slot(place.offset, width)
        self._slots += 1
        return Slot(place.offset, width, 1 << self._slots)

    def field(self, place: Address, offset: int, width: int) -> Slot:
        """A part of a data block as a variable (1, 4 or 8 bytes); it counts as written, the block has its content."""
        if width not in _LOADS:
            raise InvalidArgument(f"a field of {width} bytes")
        return Slot(place.offset + offset, width)

    # ---- operations

    def sys(
        self,
        name: str,
        *args: Argument,
        store: Slot | None = None,
        skip: Mapping[int, Label] | None = None,
        skip_any: Label | None = None,
        ok: Label = NEXT,
        retry: tuple[int, int] | None = None,
    ) -> None:
        """A system call by its kernel name, such as `openat2`. str and bytes arguments become strings in the data.

        `store` takes the result, on failure the negative errno. `ok` is where to go on success. `skip` maps an errno to
        where to go, `skip_any` says it for all others; at most three such rules together. `retry=(errno, times)` repeats
        the call. An error without a rule ends the program: Failure with this operation's index.
        """
        number = self.arch.syscalls.get(name)
        if number is None:
            raise Unsupported(f"system call {name} on {self.arch.machine}")
        op = self._append(SYS, number, name, args)
        if store is not None:
            op.dst, op.width, op.stores = store.offset, store.width, store.bit
        if skip or skip_any:
            rules = list(skip.items()) if skip else []
            if skip_any is not None:
                rules.append((_encode.ANY_ERRNO, skip_any))
            if len(rules) > _RULES_AT_MOST:
                raise InvalidArgument(f"{name}: {len(rules)} error rules, at most {_RULES_AT_MOST}")
            op.rules = rules
        if retry is not None:
            op.retry = retry
        op.true = ok

    def compare(
        self,
        value: Operand | Address,
        relation: str,
        constant: int,
        *,
        mask: int = -1,
        true: Label = NEXT,
        false: Label = NEXT,
    ) -> None:
        """`value & mask` eq, ne, lt or ge `constant` (signed, 64 bits): go to `true` or `false`."""
        op = self._append(CMP, 0, "", (value, mask, constant))
        op.relation, op.true, op.false = RELATIONS[relation], true, false

    def set(self, slot: Slot, value: Operand | Address) -> None:
        """Stores a number, an address or another slot's content."""
        op = self._append(SET, 0, "", (value,))
        op.dst, op.width, op.stores = slot.offset, slot.width, slot.bit

    def send(self, tag: int, value: Operand = 0, extra: Operand = 0) -> None:
        """A message to the parent; tags are in `program.model`. The program ends when the parent is gone."""
        if not 0 < tag < FIRST_RESERVED:
            raise InvalidArgument(f"message tag {tag}")
        if tag == PID and self._pid_op is None:
            self._pid_op = len(self._operations)
        self._append(SEND, tag, "", (value, extra))

    def wait(self, store: Slot | None = None) -> None:
        """Waits for `Running.release()`, whose byte (1 to 255) is stored. The program ends when the parent is gone."""
        op = self._append(WAIT, 0, "", ())
        if store is not None:
            op.dst, op.width, op.stores = store.offset, store.width, store.bit

    def fail(self, errno: Operand, note: str = "", *, mark: str = "") -> None:
        """Ends the program with a failure; `note` explains it to a person, `mark` names it to the caller."""
        if note or mark:
            self._notes[len(self._operations)] = (note, mark)
        self._append(FAIL, 0, "", (errno,))

    def exit(self, code: Operand) -> None:
        """Ends the process without a message, as the launcher does once it has cloned."""
        self._append(EXIT, 0, "", (code,))

    # ---- order

    def label(self, name: str = "") -> Label:
        """A label to jump to; `place` says where it is."""
        return Label(name)

    def place(self, label: Label) -> None:
        """The label is the operation that is appended next."""
        if label is NEXT or label.index >= 0:
            raise InvalidArgument(f"label {label.name!r} is placed twice")
        label.index = len(self._operations)

    def goto(self, label: Label) -> None:
        """Goes on at the label, which comes later."""
        self.compare(0, "eq", 0, true=label)

    def line(self, text: str, number: int | None = None, *, mark: str = "") -> _LineScope:
        """`with a.line("mount 'proc' on '/proc'", 17):` the operations inside belong to this plan line.

        `mark` is passed to the error (`OperationFailed.mark`), so that a caller can tell kinds of failure apart.
        """
        return _LineScope(self, Line(text, number, mark))

    @property
    def here(self) -> int:
        """How many operations there are so far: the index of the next one."""
        return len(self._operations)

    def program(self) -> Program:
        """Proves and encodes what was collected. InvalidArgument names the operation that is wrong."""
        operations = self._operations
        if not operations or operations[-1].kind not in (FAIL, EXIT):
            self.fail(_errno.EPROTO, "the program ran off its end")
        self._prove()
        pack_one = _encode.OPERATION.pack
        encoded = []
        for index, op in enumerate(operations):
            after = index + 1
            errnos, skips = [0, 0, 0], [0, 0, 0]
            if op.rules:
                for place, (number, label) in enumerate(op.rules):
                    errnos[place] = number
                    skips[place] = 0 if label is NEXT else label.index - after
            elif op.false is not NEXT:
                skips[0] = op.false.index - after
            encoded.append(
                pack_one(
                    op.kind, op.width, op.relation, op.number, *errnos, op.retry[0], op.dst, op.kinds,
                    0 if op.true is NEXT else op.true.index - after, *skips, op.retry[1], *op.words,
                )
            )  # fmt: skip
        return Program(
            _encode.encode(encoded, self._relocations, self._data),
            self.arch.machine,
            [op.call for op in operations],
            [op.line for op in operations],
            self._notes,
            self._pid_op,
        )

    # ---- inside

    def _append(self, kind: int, number: int, call: str, args: Sequence[Argument]) -> _Operation:
        op = _Operation(kind, number, call, self._line)
        words = op.words
        kinds = loads = shift = 0
        for arg in args:
            if isinstance(arg, int):
                words.append(arg & _WORD)
            elif isinstance(arg, Slot):
                kinds |= _LOADS[arg.width] << shift
                loads |= arg.bit
                words.append(arg.offset)
            else:
                kinds |= ADDRESS << shift
                words.append(arg.offset if isinstance(arg, Address) else self.string(arg).offset)
            shift += 4
        if shift > 24:
            raise InvalidArgument(f"{call}: {len(args)} arguments, at most 6")
        words.extend((0,) * (6 - len(words)))
        op.kinds, op.loads = kinds, loads
        self._operations.append(op)
        return op

    def _prove(self) -> None:
        """Walks forward once: which slots were stored into on every path that leads to an operation."""
        operations, size = self._operations, len(self._operations)
        stored: list[int] = [-1] * (size + 1)  # -1: no path leads here (all bits, neutral for &)
        stored[0] = 0
        for index, op in enumerate(operations):
            known = stored[index]
            if known == -1:
                continue
            if op.loads & ~known:
                raise InvalidArgument(
                    f"{self._where(index)}: a slot is loaded that may never have been stored"
                )
            known |= op.stores
            after = index + 1
            if op.kind in (FAIL, EXIT):
                continue
            targets = [op.true, op.false] if op.kind == CMP else [op.true, *(label for _, label in op.rules)]
            for label in targets:
                target = after if label is NEXT else label.index
                if not after <= target < size:
                    problem = "was never placed" if target < 0 else "is not a later operation"
                    raise InvalidArgument(f"{self._where(index)}: label {label.name!r} {problem}")
                stored[target] &= known
            for number, _ in op.rules:
                if not 0 < number < 4096 and number != _encode.ANY_ERRNO:
                    raise InvalidArgument(f"{self._where(index)}: errno {number}")

    def _where(self, index: int) -> str:
        op = self._operations[index]
        return f"operation {index} ({op.call or 'no call'}{', ' + op.line.text if op.line.text else ''})"
