"""Assembles programs from named system calls and jumps to labels, and checks them.

    a = Assembler()
    root = a.slot(4)
    a.at(Line("mount 'proc' on '/proc'", 17))
    a.sys("openat", -100, "/proc", O_PATH, 0, store=root)
    a.sys("mkdirat", root, "sub", 0o755, skip={EEXIST: NEXT})
    program = a.program()

The check: every jump goes forward and lands inside the program, and a slot is loaded only where all
paths have stored into it. All jumps go forward, so each operation is checked when it is appended. A
wrong operation raises InvalidArgument.

When a system call fails at run time, the program goes on at the label for the errno (`skip` in the
example). An errno without a label ends the program with a failure that names the operation and the
errno.
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

_WORD = (1 << 64) - 1
_LOADS = {1: LOAD_1, 4: LOAD_4, 8: LOAD_8}
_PADDING = [(0,) * n for n in range(7)]
# Operations have a fixed size, so the launcher's interpreter parses nothing: it indexes an array.
_RULES_AT_MOST = 3
_NOWHERE = -1
"""The bit mask of the slots that have a value, at an operation that no path reaches. It contains
all slots, so that an intersection with the mask of another path changes nothing."""
_pack = _encode.OPERATION.pack
_plain: dict[tuple[int, tuple[Argument, ...]], bytes] = {}
"""The packed bytes of calls that have only numbers as arguments, and neither a rule nor a result.
Each start has 38 such calls to drop the capabilities."""
_PLAIN_AT_MOST = 1000


class _Jump:
    """An operation that jumps to labels. It is encoded last, when every label has been placed."""

    __slots__ = ("after", "before", "index", "rules", "times", "true")

    def __init__(
        self,
        index: int,
        before: tuple[int, ...],
        true: Label,
        rules: Sequence[Label],
        times: int,
        after: Sequence[int],
    ) -> None:
        self.index = index
        self.before = before
        self.true = true
        self.rules = rules
        self.times, self.after = times, after

    def packed(self, size: int) -> bytes:
        """Encode the operation for a program of `size` operations. Raises InvalidArgument for a
        label that was never placed."""
        skips = [0, 0, 0]
        for place, label in enumerate(self.rules):
            if label is not NEXT:
                skips[place] = self._skip(label, size)
        true = 0 if self.true is NEXT else self._skip(self.true, size)
        return _pack(*self.before, true, *skips, self.times, *self.after)

    def _skip(self, label: Label, size: int) -> int:
        if not self.index < label.index < size:
            raise InvalidArgument(f"operation {self.index}: label {label.name!r} was never placed")
        return label.index - self.index - 1


class Assembler:
    """Collects operations and data for one architecture (`uname -m` name; default: this machine's).

    Operations are appended in the order of the calls. Two slots have a value from the beginning:
    - `sync`: the descriptor number of the synchronisation socket
    - `handler`: the address of a signal handler that ends the process with 128 + the signal's
      number
    """

    def __init__(self, arch: str = "") -> None:
        self.arch = _arch(arch)
        self.sync = Slot(0, 4)
        self.handler = Slot(4, 4)
        self._syscalls = self.arch.syscalls
        self._packed: list[bytes] = []
        self._jumps: list[_Jump] = []
        self._calls: list[str] = []
        self._lines: list[Line] = []
        self._line = Line("")
        self._notes: dict[int, tuple[str, str]] = {}
        self._pid_op: int | None = None
        self._ended = False  # whether the last operation ends the program
        self._data = bytearray(8)
        self._relocations: list[int] = []
        self._strings: dict[str | bytes, int] = {}
        self._constants: dict[bytes, Address] = {}
        # Bit masks, a bit per slot, for the check of loads: the slots that have a value when the
        # next operation is reached, and when each label is reached.
        self._slots = 0
        self._stored = 0
        self._stored_at: dict[Label, int] = {}

    # ---- data

    def data(self, content: bytes | int, align: int = 8) -> Address:
        """Append a block to the data and return its address. The program may write into the block.
        `content`: the block's bytes, or how many zero bytes it has."""
        data = self._data
        if pad := -len(data) % align:
            data += bytes(pad)
        address = Address(len(data))
        data += bytes(content) if isinstance(content, int) else content
        return address

    def constant(self, content: bytes) -> Address:
        """Append `content` to the data, aligned to 8 bytes, and return its address. Equal contents
        have the same address, so the program must not write there."""
        address = self._constants.get(content)
        if address is None:
            address = self._constants[content] = self.data(content)
        return address

    def string(self, text: str | bytes) -> Address:
        """Return the address of a NUL-terminated string. Equal strings have the same address, so
        the program must not write there."""
        return Address(self._string(text))

    def pointers(self, items: Sequence[bytes | str | Address]) -> Address:
        """Return the address of an array of pointers that ends in NULL, such as argv and envp.
        Texts among `items` become strings in the data."""
        places = [i.offset if isinstance(i, Address) else self._string(i) for i in items]
        table = self.data(pack(f"<{len(places) + 1}Q", *places, 0))
        self._relocations.extend(range(table.offset, table.offset + 8 * len(places), 8))
        return table

    def pointer(self, place: Address, target: Address) -> None:
        """Store a pointer to `target` in the 8 aligned bytes at `place`, which are a field of an
        iovec, msghdr or sock_fprog."""
        if place.offset % 8:
            raise InvalidArgument(
                f"a pointer at data offset {place.offset}, which is not a multiple of 8"
            )
        self._data[place.offset : place.offset + 8] = pack("<Q", target.offset)
        self._relocations.append(place.offset)

    def slot(self, width: int = 8, initial: int | None = None) -> Slot:
        """Return a variable of `width` 1, 4 or 8 bytes. Without `initial`, an operation must store
        into it before another loads it.

        Width 4 is for what a call returns as int (descriptors, pids), 8 for other results. A load
        of 1 byte is unsigned.
        """
        if width not in _LOADS:
            raise InvalidArgument(f"a slot has 1, 4 or 8 bytes, not {width}")
        value = initial or 0
        place = self.data(value.to_bytes(width, "little", signed=value < 0), width)
        if initial is not None:
            return Slot(place.offset, width)
        self._slots += 1
        return Slot(place.offset, width, 1 << self._slots)

    def field(self, place: Address, offset: int, width: int) -> Slot:
        """Return `width` (1, 4 or 8) bytes of a data block as a variable. An operation may load it
        before any store, because the block has content."""
        if width not in _LOADS:
            raise InvalidArgument(f"a field has 1, 4 or 8 bytes, not {width}")
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
        """Append a system call by its kernel name, such as `openat2`. str and bytes arguments
        become strings in the data.

        - `store`: the slot for the result; after a failure it has the negative errno
        - `ok`: the label to jump to after success
        - `skip`: errno -> label to jump to; at most three, or two with `skip_any`
        - `skip_any`: the label for all other errnos
        - `retry`: (errno, times): repeat the call while it fails with this errno, at most `times`
          times. `ok`, `skip` and `skip_any` apply to the last result.

        An errno without a label ends the program, with a FAILURE message that has the operation's
        index.
        """
        number = self._syscalls.get(name)
        if number is None:
            raise Unsupported(f"system call {name} is unknown on {self.arch.machine}")
        plain = not skip and skip_any is None and ok is NEXT
        # An exec's 43 prctl calls are the same each time: 0.16 ms to lower in place of 0.20.
        if plain and store is None and retry is None and (number, args) in _plain:
            self._append(_plain[number, args], name)
            return
        kinds, words = self._arguments(args, name)
        errno, times = retry or (0, 0)
        place, width = (store.offset, store.width) if store is not None else (0, 0)
        if store is not None:
            self._stored |= store.bit
        if plain:
            packed = _pack(
                SYS, width, 0, number, 0, 0, 0, errno, place, kinds, 0, 0, 0, 0, times, *words
            )
            if not kinds and store is None and retry is None and len(_plain) < _PLAIN_AT_MOST:
                _plain[number, args] = packed
            self._append(packed, name)
            return
        errnos = list(skip) if skip else []
        labels = list(skip.values()) if skip else []
        if skip_any is not None:
            errnos.append(_encode.ANY_ERRNO)
            labels.append(skip_any)
        if len(errnos) > _RULES_AT_MOST:
            raise InvalidArgument(f"{name}: {len(errnos)} error rules, at most {_RULES_AT_MOST}")
        for rule in errnos:
            if not 0 < rule < 4096 and rule != _encode.ANY_ERRNO:
                raise InvalidArgument(f"{self._where(name)}: {rule} is not an errno")
        before = (SYS, width, 0, number, *errnos, *_PADDING[3 - len(errnos)], errno, place, kinds)
        self._append_jump(before, ok, labels, times, words, name)

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
        """Append a comparison of `value & mask` with `constant`; `relation` is eq, ne, lt or ge. If
        it is true, the program goes to the label `true`, else to the label `false`. Numbers are
        signed and have 64 bits."""
        kinds, words = self._arguments((value, mask, constant), "compare")
        before = (CMP, 0, RELATIONS[relation], 0, 0, 0, 0, 0, 0, kinds)
        self._append_jump(before, true, (false,), 0, words, "")

    def set(self, slot: Slot, value: Operand | Address) -> None:
        """Append an operation that stores `value` in `slot`. `value`: a number, an address, or
        another slot whose content is copied."""
        kinds, words = self._arguments((value,), "set")
        self._stored |= slot.bit
        self._append(
            _pack(SET, slot.width, 0, 0, 0, 0, 0, 0, slot.offset, kinds, 0, 0, 0, 0, 0, *words), ""
        )

    def send(self, tag: int, value: Operand = 0, extra: Operand = 0) -> None:
        """Append a message to the parent: a `tag` of `program.model` and two numbers, whose meaning
        depends on the tag. At run time, the program ends if the parent is gone."""
        if not 0 < tag < FIRST_RESERVED:
            raise InvalidArgument(f"message tag {tag} is reserved")
        if tag == PID and self._pid_op is None:
            self._pid_op = len(self._packed)
        kinds, words = self._arguments((value, extra), "send")
        self._append(_pack(SEND, 0, 0, tag, 0, 0, 0, 0, 0, kinds, 0, 0, 0, 0, 0, *words), "")

    def wait(self) -> None:
        """Append an operation that waits until the parent calls `RunningProgram.release`. At run
        time, the program ends if the parent is gone."""
        self._append(_pack(WAIT, *[0] * 14, *_PADDING[6]), "")

    def fail(self, errno: Operand, note: str = "", *, mark: str = "") -> None:
        """Append an operation that ends the program with a failure. `note`: an explanation for a
        person; `mark`: the kind of failure, for the caller."""
        if note or mark:
            self._notes[len(self._packed)] = (note, mark)
        self._append_end(FAIL, errno)

    def exit(self, code: Operand) -> None:
        """Append an operation that ends the process with this exit code, without a message to the
        parent."""
        self._append_end(EXIT, code)

    # ---- order

    def label(self, name: str = "") -> Label:
        """Make a label, to which operations can jump. `place` sets its position."""
        return Label(name)

    def place(self, label: Label) -> None:
        """Place the label before the next operation."""
        if label is NEXT or label.index >= 0:
            raise InvalidArgument(f"label {label.name!r} is placed twice")
        label.index = len(self._packed)
        self._ended = False
        # Where paths meet, only what was stored on each of them counts.
        self._stored &= self._stored_at.get(label, _NOWHERE)

    def goto(self, label: Label) -> None:
        """Append a jump to a label that is not placed yet."""
        self.compare(0, "eq", 0, true=label, false=label)

    def at(self, line: Line) -> None:
        """Assign all operations that are appended from now on to this line of the plan."""
        self._line = line

    @property
    def here(self) -> int:
        """Return the number of operations so far, which is the index of the next operation."""
        return len(self._packed)

    def program(self) -> Program:
        """Encode the collected operations. Raises InvalidArgument if an operation jumps to a label
        that was never placed; the error has the operation's index."""
        if not self._ended:
            # The launcher refuses a program without an end: its interpreter has no bounds check at
            # each step.
            self.fail(_errno.EPROTO, "the program ran off its end")
        operations = self._packed
        for jump in self._jumps:
            operations[jump.index] = jump.packed(len(operations))
        encoded = _encode.encode(operations, self._relocations, self._data)
        return Program(encoded, self._calls, self._lines, self._notes, self._pid_op)

    # ---- inside

    def _string(self, text: str | bytes) -> int:
        offset = self._strings.get(text)
        if offset is None:
            raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
            # The kernel would read a shorter string than the plan shows.
            if b"\0" in raw:
                raise InvalidArgument(f"{raw!r} contains a NUL character")
            offset = self._strings.get(raw)
            if offset is None:
                offset = self._strings[raw] = len(self._data)
                self._data += raw + b"\0"
            self._strings[text] = offset
        return offset

    def _arguments(self, args: Sequence[Argument], what: str) -> tuple[int, list[int]]:
        """Encode the arguments as six words, and their kinds as 4 bits each. Raises InvalidArgument
        for more than six arguments, and for a slot that has no value yet on some path to this
        operation."""
        words: list[int] = []
        kinds = shift = 0
        for arg in args:
            if isinstance(arg, int):
                words.append(arg & _WORD)
            elif isinstance(arg, Slot):
                if arg.bit & ~self._stored:
                    raise InvalidArgument(
                        f"{self._where(what)}: a slot is loaded that may never have been stored"
                    )
                kinds |= _LOADS[arg.width] << shift
                words.append(arg.offset)
            else:
                kinds |= ADDRESS << shift
                words.append(arg.offset if isinstance(arg, Address) else self._string(arg))
            shift += 4
        if shift > 24:
            raise InvalidArgument(f"{what}: {len(args)} arguments, at most 6")
        words += _PADDING[6 - len(words)]
        return kinds, words

    def _append(self, packed: bytes, call: str) -> None:
        self._packed.append(packed)
        self._calls.append(call)
        self._lines.append(self._line)
        self._ended = False

    def _append_end(self, kind: int, value: Operand) -> None:
        kinds, words = self._arguments((value,), "exit")
        self._append(_pack(kind, 0, 0, 0, 0, 0, 0, 0, 0, kinds, 0, 0, 0, 0, 0, *words), "")
        self._ended = True
        self._stored = _NOWHERE

    def _append_jump(
        self,
        before: tuple[int, ...],
        true: Label,
        rules: Sequence[Label],
        times: int,
        words: Sequence[int],
        call: str,
    ) -> None:
        """Append an operation that jumps to `true` or to one of the labels `rules`.

        - `before`, `words`, `times`: the operation's other fields
        - `call`: its system call's name

        Records which slots have a value on all paths to each label. If no label is NEXT, only a
        jump can reach the following operation.
        """
        index, stored = len(self._packed), self._stored
        jumps = reached = False
        for label in (true, *rules):
            if label is NEXT:
                reached = True
            # A placed label is behind: a jump back could loop, and a program must end on its own.
            elif label.index >= 0:
                raise InvalidArgument(
                    f"{self._where(call)}: label {label.name!r} is not a later operation"
                )
            else:
                jumps = True
                self._stored_at[label] = self._stored_at.get(label, _NOWHERE) & stored
        if jumps:
            self._jumps.append(_Jump(index, before, true, rules, times, words))
            self._append(b"", call)
        else:
            self._append(_pack(*before, 0, 0, 0, 0, times, *words), call)
        if not reached:
            self._stored = _NOWHERE

    def _where(self, what: str) -> str:
        text = f", {self._line.text}" if self._line.text else ""
        return f"operation {len(self._packed)} ({what}{text})"
