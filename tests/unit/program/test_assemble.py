"""Tests that the assembler refuses wrong programs, for example one that loads a slot before it
stores it, and encodes the others for the launcher."""

from __future__ import annotations

import errno
import os
import random
import struct

import pytest

from pyrunc.abi.arch import arch
from pyrunc.errors import InvalidArgument, Unsupported
from pyrunc.program import encode, macros
from pyrunc.program.assemble import NEXT, Assembler
from pyrunc.program.errors import failure
from pyrunc.program.model import CMP, EXIT, FAIL, LOAD_4, LOAD_8, SEND, SYS, Line, Program


def parse(program: Program) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[int], bytes]:
    """Return header, operations, relocations and data of the encoded program."""
    raw = program.encoded
    header = encode.HEADER.unpack_from(raw)
    _, _, operations, relocations, start, size = header
    ops = [encode.OPERATION.unpack_from(raw, 32 + 96 * i) for i in range(operations)]
    table = struct.unpack_from(f"<{relocations}I", raw, 32 + 96 * operations)
    assert len(raw) == start + size
    return header, ops, list(table), raw[start:]


def test_the_layout_is_that_of_the_launcher() -> None:
    a = Assembler("x86_64")
    where = a.slot(4)
    a.sys("openat", -100, "/x", 0, store=where, skip={errno.ENOENT: NEXT}, retry=(errno.EAGAIN, 9))
    a.send(7, 1, 2)
    a.exit(3)
    header, ops, relocations, data = parse(a.program())
    assert header[:4] == (encode.MAGIC, encode.VERSION, 3, 0)
    kind, width, relation, number, *rest = ops[0]
    assert (kind, width, relation, number) == (SYS, 4, 0, 257)
    assert rest[:4] == [errno.ENOENT, 0, 0, errno.EAGAIN]
    place, kinds, skip_ok, s1, s2, s3, times = rest[4:11]
    assert (place, skip_ok, s1, s2, s3, times) == (where.offset, 0, 0, 0, 0, 9)
    assert kinds == 1 << 4
    assert rest[11:14] == [(-100) & (1 << 64) - 1, data.index(b"/x\0"), 0]
    assert ops[1][0] == SEND and ops[1][3] == 7 and ops[1][-6:-4] == (1, 2)
    assert ops[2][0] == EXIT and ops[2][-6] == 3
    assert relocations == []


def test_every_record_has_the_size_that_the_launcher_expects() -> None:
    assert encode.OPERATION.size == 96
    assert encode.HEADER.size == 32


def test_labels_become_forward_skips() -> None:
    a = Assembler()
    first, second, third = a.label(), a.label(), a.label()
    a.sys("getpid", ok=third, skip={1: first, 2: second}, skip_any=NEXT)
    a.exit(0)
    a.place(first)
    a.exit(1)
    a.place(second)
    a.exit(2)
    a.place(third)
    a.exit(3)
    _, ops, _, _ = parse(a.program())
    _, _, _, _, e1, e2, e3, _, _, _, ok, s1, s2, s3, *_ = ops[0]
    assert (e1, e2, e3) == (1, 2, encode.ANY_ERRNO)
    assert (ok, s1, s2, s3) == (3, 1, 2, 0)


def test_a_program_that_runs_off_its_end_fails_there() -> None:
    a = Assembler()
    a.sys("getpid")
    program = a.program()
    assert parse(program)[1][-1][0] == FAIL
    assert "ran off its end" in failure(program, 1, errno.EPROTO).message


def test_equal_strings_share_a_place_and_blocks_do_not() -> None:
    a = Assembler()
    assert a.string("abc").offset == a.string(b"abc").offset != a.string("ab").offset
    assert a.data(b"abc").offset != a.data(b"abc").offset


def test_pointers_are_offsets_with_relocations_and_a_null() -> None:
    a = Assembler()
    argv = a.pointers(["one", b"two"])
    a.exit(0)
    _, _, relocations, data = parse(a.program())
    assert relocations == [argv.offset, argv.offset + 8]
    first, second, null = struct.unpack_from("<3Q", data, argv.offset)
    assert (data[first : first + 4], data[second : second + 4], null) == (b"one\0", b"two\0", 0)


def test_a_structure_may_contain_a_pointer() -> None:
    a = Assembler()
    target = a.data(b"x")
    iovec = a.data(16)
    a.pointer(iovec, target)
    a.exit(0)
    _, _, relocations, data = parse(a.program())
    assert relocations == [iovec.offset]
    assert struct.unpack_from("<Q", data, iovec.offset) == (target.offset,)
    with pytest.raises(InvalidArgument, match="multiple of 8"):
        a.pointer(iovec.at(4), target)


def test_slots_are_aligned_and_hold_their_initial_value() -> None:
    a = Assembler()
    a.string("x")
    four, eight = a.slot(4, -2), a.slot(8, 1 << 40)
    a.send(1, four, eight)
    a.exit(0)
    _, ops, _, data = parse(a.program())
    assert four.offset % 4 == eight.offset % 8 == 0
    assert struct.unpack_from("<i", data, four.offset) == (-2,)
    assert struct.unpack_from("<Q", data, eight.offset) == (1 << 40,)
    assert ops[0][9] == LOAD_4 | LOAD_8 << 4


def test_loading_a_slot_before_its_store_is_refused() -> None:
    a = Assembler()
    slot = a.slot(4)
    a.at(Line("mount 'x'"))
    reason = r"operation 0 \(send, mount 'x'\): .*may never have been stored"
    with pytest.raises(InvalidArgument, match=reason):
        a.send(1, slot)


@pytest.mark.parametrize("use", ["sys", "compare", "set", "fail", "exit"])
def test_every_operation_s_loads_are_proved(use: str) -> None:
    a = Assembler()
    slot = a.slot(4)
    with pytest.raises(InvalidArgument, match="never have been stored"):
        {
            "sys": lambda: a.sys("close", slot),
            "compare": lambda: a.compare(slot, "eq", 0),
            "set": lambda: a.set(a.slot(4), slot),
            "fail": lambda: a.fail(slot),
            "exit": lambda: a.exit(slot),
        }[use]()


def test_a_slot_must_be_stored_on_every_path() -> None:
    a = Assembler()
    slot, around = a.slot(4), a.label("around")
    a.sys("getpid", skip={errno.EPERM: around})
    a.set(slot, 1)
    a.send(1, slot)
    a.place(around)
    with pytest.raises(InvalidArgument, match="operation 3"):
        a.send(1, slot)


def test_a_call_that_jumps_on_success_falls_through_only_by_a_rule() -> None:
    a = Assembler()
    slot, done = a.slot(4), a.label()
    a.sys("getpid", ok=done)  # an error fails, so nothing leads to the next operation
    a.send(1, slot)
    a.exit(0)
    a.place(done)
    with pytest.raises(InvalidArgument, match="never have been stored"):
        a.send(1, slot)


def test_a_loop_over_all_small_programs_agrees_with_walking_every_path() -> None:
    """On random programs, the assembler's check that each slot is stored before it is loaded agrees
    with a search of all paths."""
    rng = random.Random(1)
    verdicts = {True: 0, False: 0}
    for _ in range(3000):
        steps = [
            (rng.choice(["set", "load", "jump", "branch", "exit"]), rng.randint(1, 4))
            for _ in range(7)
        ]
        good = all_paths_are_good(steps)
        verdicts[good] += 1
        assert assembles(steps) == good, steps
    assert min(verdicts.values()) > 100


def all_paths_are_good(steps: list[tuple[str, int]]) -> bool:
    def walk(index: int, stored: bool) -> bool:
        if index >= len(steps):
            return True
        kind, distance = steps[index]
        if kind == "load" and not stored:
            return False
        if kind == "exit":
            return True
        stored = stored or kind == "set"
        ways = {"jump": [distance], "branch": [1, distance]}.get(kind, [1])
        return all(walk(index + way, stored) for way in ways)

    return walk(0, False)


def assembles(steps: list[tuple[str, int]]) -> bool:
    a = Assembler()
    slot = a.slot(4)
    labels = [a.label(str(i)) for i in range(len(steps) + 5)]
    try:
        for index, (kind, distance) in enumerate(steps):
            a.place(labels[index])
            target = labels[index + distance]
            if kind == "set":
                a.set(slot, 1)
            elif kind == "load":
                a.send(1, slot)
            elif kind == "jump":
                a.goto(target)
            elif kind == "branch":
                a.sys("getpid", skip={errno.EPERM: target})
            else:
                a.exit(0)
        for label in labels[len(steps) :]:
            a.place(label)
        a.program()
    except InvalidArgument:
        return False
    return True


def test_stored_on_both_branches_is_stored() -> None:
    a = Assembler()
    slot, other, end = a.slot(4), a.label(), a.label()
    a.compare(0, "eq", 1, true=other)
    a.set(slot, 1)
    a.goto(end)
    a.place(other)
    a.set(slot, 2)
    a.place(end)
    a.send(1, slot)
    a.exit(0)
    assert len(a.program().calls) == 6


def test_a_branch_that_ends_does_not_count() -> None:
    a = Assembler()
    slot, go_on = a.slot(4), a.label()
    a.compare(0, "eq", 1, true=go_on)
    a.exit(1)
    a.place(go_on)
    a.set(slot, 1)
    a.send(1, slot)
    a.exit(0)
    a.program()


def test_a_result_counts_as_stored_also_when_the_call_fails() -> None:
    a = Assembler()
    slot = a.slot(4)
    a.sys("getpid", store=slot, skip_any=NEXT)
    a.send(1, slot)
    a.exit(0)
    a.program()


def test_jumps_go_forward() -> None:
    a = Assembler()
    label = a.label("there")
    a.place(label)
    with pytest.raises(InvalidArgument, match=r"there.*later"):
        a.goto(label)


def test_jumps_go_to_places_that_exist() -> None:
    a = Assembler()
    a.goto(a.label("there"))
    a.exit(0)
    with pytest.raises(InvalidArgument, match=r"operation 0: label 'there' was never placed"):
        a.program()


def test_a_label_at_the_very_end_is_a_failure() -> None:
    a = Assembler()
    label = a.label("end")
    a.goto(label)
    a.exit(0)
    a.place(label)
    _, ops, _, _ = parse(a.program())
    assert [op[0] for op in ops] == [CMP, EXIT, FAIL]


def test_a_label_is_placed_once() -> None:
    a = Assembler()
    label = a.label("twice")
    a.place(label)
    with pytest.raises(InvalidArgument, match="twice"):
        a.place(label)
    with pytest.raises(InvalidArgument):
        a.place(NEXT)


def test_operations_beyond_the_launchers_limits_are_refused() -> None:
    a = Assembler()
    with pytest.raises(InvalidArgument, match="4 error rules"):
        a.sys("getpid", skip={1: NEXT, 2: NEXT, 3: NEXT}, skip_any=NEXT)
    with pytest.raises(InvalidArgument, match="7 arguments"):
        a.sys("getpid", 1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(Unsupported, match="no_such_call"):
        a.sys("no_such_call")
    with pytest.raises(InvalidArgument, match="NUL"):
        a.string("a\0b")
    with pytest.raises(InvalidArgument, match="not 2"):
        a.slot(2)
    with pytest.raises(InvalidArgument, match="tag"):
        a.send(0xFFFFFFFF)


@pytest.mark.parametrize("number", [0, 4096, -1])
def test_errno_rules_are_errnos(number: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{number} is not an errno"):
        Assembler().sys("getpid", skip={number: NEXT})


def test_constants_are_shared_and_blocks_are_not() -> None:
    a = Assembler()
    assert a.constant(b"12345678").offset == a.constant(b"12345678").offset
    assert a.constant(b"12345678").offset != a.data(b"12345678").offset


def test_a_failure_names_its_line_call_and_errno() -> None:
    a = Assembler()
    a.at(Line("mount 'proc' on '/proc'", 17))
    a.sys("mount", 0, "/proc", "proc", 0, 0)
    a.sys("move_mount", -1, "", -1, "", 0)
    a.at(Line(""))
    a.sys("getpid")
    a.fail(errno.ENODEV, "is no device", mark="device")
    program = a.program()
    assert str(failure(program, 0, errno.EPERM)) == "mount 'proc' on '/proc': EPERM (plan line 17)"
    error = failure(program, 1, errno.EBUSY)
    assert str(error) == "mount 'proc' on '/proc': EBUSY (move_mount, plan line 17)"
    assert (error.line, error.op_index, error.errno) == (17, 1, errno.EBUSY)
    assert str(failure(program, 2, errno.EIO)) == "getpid operation 2: EIO"
    assert failure(program, 3, errno.ENODEV).mark == "device"
    assert "is no device" in str(failure(program, 3, errno.ENODEV))
    assert "operation 99" in str(failure(program, 99, errno.EIO))


def test_operations_belong_to_the_line_that_was_set_before_them() -> None:
    a = Assembler()
    a.sys("getpid")
    a.at(Line("first", 1))
    a.sys("getpid")
    a.at(Line("second", 2))
    a.sys("getpid")
    a.exit(0)
    assert [line.text for line in a.program().lines] == ["", "first", "second", "second"]


def test_the_prologue_undoes_changes_of_posix_spawn() -> None:
    a = Assembler()
    macros.prologue(a)
    a.exit(0)
    program = a.program()
    assert program.calls[0] == "fcntl"
    _, ops, _, _ = parse(program)
    assert [
        op[-6] for op, call in zip(ops, program.calls, strict=True) if call == "rt_sigaction"
    ] == [32, 33]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_macro_assembles_on_every_architecture(machine: str) -> None:
    a = Assembler(machine)
    macros.prologue(a)
    macros.fork_parent(a, 0x20000, cgroup=7)
    root = macros.open_at(a, -100, "/", resolve=0)
    a.sys("close", macros.make_directories(a, root, "/a/b"))
    a.sys("close", macros.make_file(a, root, "/a/c"))
    macros.require_device(a, root, 1, 3, "/dev/null")
    macros.send_fd(a, root)
    macros.require(a, root, "ge", 0, errno.EBADF, "no root")
    macros.check_program(a, ["/bin/x", "/usr/bin/x"])
    macros.close_all_from(a, 3, keep=[5, 4, 9])
    result = a.slot(4)
    macros.execute(a, ["/bin/x"], a.pointers(["x"]), a.pointers([]), result=result)
    a.fail(result)
    assert len(a.program().calls) > 50


def test_close_all_from_keeps_the_listed_descriptors() -> None:
    a = Assembler()
    macros.close_all_from(a, 3, keep=[2, 3, 7, 8])
    a.exit(0)
    _, ops, _, _ = parse(a.program())
    assert [op[-6:-4] for op in ops[:-1]] == [(4, 6), (9, 0xFFFFFFFF)]


def test_the_tables_agree_with_this_machine_and_between_architectures() -> None:
    here = arch()
    assert (here.o_directory, here.o_nofollow) == (os.O_DIRECTORY, os.O_NOFOLLOW)
    x86, arm = arch("x86_64").syscalls, arch("aarch64").syscalls
    assert (x86["execve"], arm["execve"]) == (59, 221)
    assert (x86["statx"], arm["statx"]) == (332, 291)
    for table in (x86, arm):
        assert len(set(table.values())) == len(table)


def test_an_unknown_architecture_is_reported() -> None:
    with pytest.raises(Unsupported, match="riscv64"):
        Assembler("riscv64")


@pytest.mark.skipif("PYRUNC_GUEST" in os.environ, reason="emulated processors have no speed")
def test_assembling_a_program_is_fast_enough_for_every_start() -> None:
    import time

    def build() -> None:
        a = Assembler()
        root = a.slot(4, 3)
        for i in range(120):
            a.at(Line(f"line {i}", i))
            a.sys(
                "openat",
                root,
                f"/some/path/{i}",
                0,
                0,
                store=a.slot(4),
                skip={errno.ENOENT: NEXT},
            )
        a.exit(0)
        a.program()

    best = min(_timed(build, time.perf_counter) for _ in range(30))
    assert best < 0.002, (
        f"{best * 1000:.2f} ms for 120 operations; the aim is 0.5 on a quiet machine"
    )


def _timed(function: object, clock: object) -> float:
    assert callable(function) and callable(clock)
    start = clock()
    function()
    return float(clock() - start)
