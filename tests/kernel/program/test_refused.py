"""Tests that the launcher refuses an invalid program before its first call, with a reason, and that
no program crashes it."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable

import pytest

from pyrunc.program import encode
from pyrunc.program.assemble import Assembler
from pyrunc.program.model import REFUSED
from tests.kernel.program.harness import MACHINES, NATIVE, run

SHORT, VERSION, SIZES, KIND, ARGUMENT_KIND, PLACE, SKIP, RELOCATION, NO_END, UNMAPPED = range(1, 11)
HEAD, OP = 32, 96
# Where the fields of an operation are.
AT = {
    "kind": 0,
    "width": 1,
    "relation": 2,
    "number": 4,
    "place": 16,
    "kinds": 20,
    "skip": 24,
    "skips": 28,
    "args": 48,
}


def sample(machine: str = NATIVE) -> bytearray:
    """Return a correct program with an operation of every kind; it only reads numbers and sends
    them."""
    a = Assembler(machine)
    slot, byte = a.slot(8), a.slot(1, 3)
    end, other = a.label(), a.label()
    a.sys(
        "getppid", store=slot, skip={errno.EPERM: other, errno.ENOENT: end}, retry=(errno.EAGAIN, 2)
    )
    a.set(byte, 7)
    a.compare(byte, "eq", 7, true=other, false=end)
    a.place(other)
    a.send(9, byte, slot)
    a.pointers(["x", "yz"])
    a.place(end)
    a.fail(5)
    a.exit(0)
    return bytearray(a.program().encoded)


OPERATIONS = 6


def refused(raw: bytes | bytearray, machine: str) -> tuple[int, int]:
    """Return the operation at which the launcher refused the program, and the reason."""
    ended = run(bytes(raw), machine)
    assert ended.status == 126, ended
    ((tag, index, reason, extra),) = ended.messages
    assert (tag, extra) == (REFUSED, 0)
    return index, reason


def put(raw: bytearray, index: int, name: str, layout: str, value: int, offset: int = 0) -> None:
    struct.pack_into("<" + layout, raw, HEAD + OP * index + AT[name] + offset, value)


@pytest.mark.parametrize("machine", MACHINES)
class TestEachField:
    def test_the_sample_itself_runs(self, machine: str) -> None:
        ended = run(bytes(sample(machine)), machine)
        assert ended.messages[0][0] == 9 and ended.status == 125

    def test_an_empty_program_is_refused(self, machine: str) -> None:
        assert refused(b"", machine) == (0, SHORT)

    @pytest.mark.parametrize("length", [1, 31, 32, 127])
    def test_a_program_too_short_for_its_header_is_refused(self, machine: str, length: int) -> None:
        assert refused(bytes(sample(machine))[:length], machine) == (0, SHORT)

    @pytest.mark.parametrize("missing", [1, 8, 24, 100])
    def test_a_truncated_program_is_refused(self, machine: str, missing: int) -> None:
        assert refused(bytes(sample(machine))[:-missing], machine) == (0, SIZES)

    def test_a_program_with_added_bytes_is_refused(self, machine: str) -> None:
        assert refused(bytes(sample(machine)) + b"\0", machine) == (0, SIZES)

    def test_a_wrong_magic_is_refused(self, machine: str) -> None:
        raw = sample(machine)
        raw[0] ^= 1
        assert refused(raw, machine) == (0, SHORT)

    @pytest.mark.parametrize("version", [0, 2, 0xFFFFFFFF])
    def test_another_version_is_refused(self, machine: str, version: int) -> None:
        raw = sample(machine)
        struct.pack_into("<I", raw, 4, version)
        assert refused(raw, machine) == (0, VERSION)

    @pytest.mark.parametrize(
        ("offset", "value"),
        [
            (8, 0),
            (8, 7),
            (8, 0xFFFFFFFF),
            (12, 1000),
            (12, 0xFFFFFFFF),
            (16, 0),
            (16, 0xFFFFFFF0),
            (16, 33),
            (20, 0),
            (20, 7),
            (20, 0xFFFFFFFF),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused(self, machine: str, offset: int, value: int) -> None:
        raw = sample(machine)
        struct.pack_into("<I", raw, offset, value)
        assert refused(raw, machine)[1] == SIZES

    @pytest.mark.parametrize("kind", [0, 8, 255])
    def test_an_unknown_operation_is_refused(self, machine: str, kind: int) -> None:
        raw = sample(machine)
        put(raw, 1, "kind", "B", kind)
        assert refused(raw, machine) == (1, KIND)

    def test_an_unknown_relation_is_refused(self, machine: str) -> None:
        raw = sample(machine)
        put(raw, 2, "relation", "B", 4)
        assert refused(raw, machine) == (2, KIND)

    @pytest.mark.parametrize("tag", [0, 0xFFFFFFF0, 0xFFFFFFFE, 0xFFFFFFFF])
    def test_reserved_tags_are_refused(self, machine: str, tag: int) -> None:
        raw = sample(machine)
        put(raw, 3, "number", "I", tag)
        assert refused(raw, machine) == (3, KIND)

    @pytest.mark.parametrize("argument", range(8))
    def test_an_unknown_argument_kind_is_refused(self, machine: str, argument: int) -> None:
        raw = sample(machine)
        put(raw, 0, "kinds", "I", 5 << 4 * argument)
        assert refused(raw, machine) == (0, ARGUMENT_KIND)

    @pytest.mark.parametrize(("kind", "width"), [(1, 0), (2, 1), (3, 4), (4, 8)])
    @pytest.mark.parametrize("argument", range(6))
    def test_arguments_outside_of_the_data_are_refused(
        self, machine: str, kind: int, width: int, argument: int
    ) -> None:
        size = struct.unpack_from("<I", sample(machine), 20)[0]
        for value in (size - width + 1, size + 1, 1 << 40, (1 << 64) - 1):
            raw = sample(machine)
            put(raw, 5, "kinds", "I", kind << 4 * argument)
            put(raw, 5, "args", "Q", value, 8 * argument)
            assert refused(raw, machine) == (5, PLACE)
        raw = sample(machine)
        put(raw, 5, "kinds", "I", kind << 4 * argument)
        put(raw, 5, "args", "Q", size - width, 8 * argument)
        assert run(bytes(raw), machine).status == 125

    @pytest.mark.parametrize("width", [2, 3, 5, 7, 9, 16, 255])
    def test_an_invalid_width_is_refused(self, machine: str, width: int) -> None:
        raw = sample(machine)
        put(raw, 0, "width", "B", width)
        assert refused(raw, machine) == (0, PLACE)

    def test_set_needs_a_width(self, machine: str) -> None:
        raw = sample(machine)
        put(raw, 1, "width", "B", 0)
        assert refused(raw, machine) == (1, PLACE)

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_store_outside_of_the_data_is_refused(self, machine: str, index: int) -> None:
        size = struct.unpack_from("<I", sample(machine), 20)[0]
        for place in (size - 7, size, 0xFFFFFFFF):
            raw = sample(machine)
            put(raw, index, "width", "B", 8)
            put(raw, index, "place", "I", place)
            assert refused(raw, machine) == (index, PLACE)

    @pytest.mark.parametrize("field", range(4))
    def test_skips_outside_of_the_program_are_refused(self, machine: str, field: int) -> None:
        for skip in (OPERATIONS - 1, OPERATIONS, 0x7FFFFFFF, 0xFFFFFFFF):
            raw = sample(machine)
            put(raw, 0, "skip", "I", skip, 4 * field)
            assert refused(raw, machine) == (0, SKIP)
        raw = sample(machine)
        put(raw, 0, "skip", "I", OPERATIONS - 2, 4 * field)
        assert run(bytes(raw), machine).status in (0, 125)

    @pytest.mark.parametrize("index", range(OPERATIONS - 2))
    def test_every_operation_s_skip_is_checked(self, machine: str, index: int) -> None:
        raw = sample(machine)
        put(raw, index, "skip", "I", OPERATIONS - index)
        assert refused(raw, machine) == (index, SKIP)

    def test_a_program_without_an_end_is_refused(self, machine: str) -> None:
        raw = sample(machine)
        put(raw, OPERATIONS - 1, "kind", "B", 1)
        assert refused(raw, machine) == (OPERATIONS - 1, NO_END)

    @pytest.mark.parametrize("value", [1, 4, 0xFFFFFFFF, 0xFFFFFFF8])
    def test_a_relocation_outside_of_the_data_or_unaligned_is_refused(
        self, machine: str, value: int
    ) -> None:
        raw = sample(machine)
        struct.pack_into("<I", raw, HEAD + OP * OPERATIONS, value)
        assert refused(raw, machine) == (0, RELOCATION)

    def test_a_relocated_word_that_points_outside_is_refused(self, machine: str) -> None:
        raw = sample(machine)
        (start,) = struct.unpack_from("<I", raw, 16)
        (place,) = struct.unpack_from("<I", raw, HEAD + OP * OPERATIONS)
        struct.pack_into("<Q", raw, start + place, len(raw))
        assert refused(raw, machine) == (0, RELOCATION)

    @pytest.mark.parametrize(
        "arguments", [[], [""], ["x"], ["-1"], ["3 "], ["99999999999999999999"]]
    )
    def test_arguments_that_are_no_number_are_refused(
        self, machine: str, arguments: list[str]
    ) -> None:
        ended = run(bytes(sample(machine)), machine, arguments=arguments)
        assert (ended.status, ended.messages) == (126, [])

    def test_a_descriptor_that_is_not_open_is_refused(self, machine: str) -> None:
        assert run(bytes(sample(machine)), machine, arguments=["777"]).status == 126


def harmless(raw: bytearray) -> bytes:
    """Replace every call by getppid, so that a mutated program runs only the launcher's own
    code."""
    count = struct.unpack_from("<I", raw, 8)[0]
    getppid = Assembler(NATIVE).arch.syscalls["getppid"]
    for index in range(min(count, (len(raw) - HEAD) // OP)):
        if raw[HEAD + OP * index] == 1:
            put(raw, index, "number", "I", getppid)
        if raw[HEAD + OP * index] == 5:
            put(raw, index, "kind", "B", 3)  # no peer answers a wait here
    return bytes(raw)


def flip_bits(raw: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)


def overwrite_words(raw: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 6)):
        value = rng.choice(
            [0, 1, 7, 8, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(raw), rng.getrandbits(32)]
        )
        struct.pack_into("<I", raw, rng.randrange(0, len(raw) - 4, 4), value)


def cut_and_repeat(raw: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(raw))
    piece = raw[start : start + rng.randint(1, 200)]
    if rng.random() < 0.5:
        del raw[start : start + len(piece)]
    else:
        raw[start:start] = piece


def random_operations(raw: bytearray, rng: random.Random) -> None:
    for index in range(OPERATIONS):
        raw[HEAD + OP * index : HEAD + OP * (index + 1)] = encode.OPERATION.pack(
            rng.randint(1, 7), rng.choice([0, 1, 4, 8]), rng.randint(0, 3), rng.randint(1, 50),
            *(rng.randint(0, 200) for _ in range(4)), rng.randint(0, 60),
            rng.getrandbits(24) & 0x333333,
            *(rng.randint(0, OPERATIONS) for _ in range(4)), rng.randint(0, 5),
            *(rng.choice([0, 8, 16, 40, rng.getrandbits(64)]) for _ in range(6)),
        )  # fmt: skip


@pytest.mark.parametrize("mutate", [flip_bits, overwrite_words, cut_and_repeat, random_operations])
@pytest.mark.parametrize("seed", range(3))
def test_mutations_are_refused_or_run_but_never_crash(
    mutate: Callable[[bytearray, random.Random], None], seed: int
) -> None:
    rng = random.Random(f"{mutate.__name__} {seed}")
    statuses = set()
    for round_number in range(120):
        raw = sample()
        mutate(raw, rng)
        ended = run(harmless(raw))
        assert ended.status >= 0, f"signal {-ended.status} in round {round_number}: {raw.hex()}"
        statuses.add(ended.status)
    assert 126 in statuses
