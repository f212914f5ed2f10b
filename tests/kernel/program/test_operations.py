"""Tests every kind of operation, with its rules, on the real launcher of each architecture."""

from __future__ import annotations

import errno
import os
import struct
import time

import pytest

from pyrunc.program import macros
from pyrunc.program.assemble import NEXT, Assembler
from pyrunc.program.model import FAILURE
from tests.kernel.program.harness import MACHINES, Launched, run

pytestmark = pytest.mark.parametrize("machine", MACHINES)
E0, E1, E2 = errno.ENOENT, errno.EBADF, errno.EINVAL


def test_arguments_of_every_kind_arrive(machine: str) -> None:
    a = Assembler(machine)
    block = a.data(bytes([0xFF, 1, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF]) + struct.pack("<q", -3))
    one, four, eight = a.field(block, 0, 1), a.field(block, 4, 4), a.field(block, 8, 8)
    a.send(1, one, four)
    a.send(1, eight, -5)
    here, there = a.slot(8), a.slot(8)
    a.set(here, block)
    a.set(there, block.at(12))
    a.send(1, here, there)
    a.exit(0)
    ended = run(a.program(), machine)
    assert ended.values[:2] == [(255, -2), (-3, -5)]
    assert ended.values[2][1] - ended.values[2][0] == 12
    assert ended.status == 0


@pytest.mark.parametrize(
    ("width", "expected"), [(1, 0x88), (4, 0x55667788), (8, 0x1122334455667788)]
)
def test_set_writes_only_the_bytes_of_its_field(machine: str, width: int, expected: int) -> None:
    a = Assembler(machine)
    block = a.data(b"\xee" * 24)
    a.set(a.field(block, 8, width), 0x1122334455667788)
    a.send(1, a.field(block, 8, width), a.field(block, 8 + width, 1))
    a.send(1, a.field(block, 7, 1))
    a.exit(0)
    assert run(a.program(), machine).values == [(expected, 0xEE), (0xEE, 0)]


def test_set_copies_slots(machine: str) -> None:
    a = Assembler(machine)
    narrow, wide = a.slot(4, -7), a.slot(8)
    a.set(wide, narrow)
    a.send(1, wide)
    a.exit(0)
    assert run(a.program(), machine).values == [(-7, 0)]


@pytest.mark.parametrize(
    ("value", "relation", "constant", "mask", "holds"),
    [
        (5, "eq", 5, -1, True),
        (5, "eq", 6, -1, False),
        (5, "ne", 6, -1, True),
        (5, "ne", 5, -1, False),
        (-1, "lt", 0, -1, True),
        (0, "lt", 0, -1, False),
        (1, "lt", -1, -1, False),
        (0, "ge", 0, -1, True),
        (-1, "ge", 0, -1, False),
        (7, "ge", -9, -1, True),
        (0o100644, "eq", 0o100000, 0o170000, True),
        (0o040755, "eq", 0o100000, 0o170000, False),
        (1 << 63, "lt", 0, -1, True),
    ],
)
def test_compare_jumps_to_the_label_of_its_result(
    machine: str, value: int, relation: str, constant: int, mask: int, holds: bool
) -> None:
    a = Assembler(machine)
    slot = a.slot(8)
    a.set(slot, value)
    yes, no = a.label(), a.label()
    a.compare(slot, relation, constant, mask=mask, true=yes, false=no)
    a.exit(9)
    a.place(yes)
    a.exit(1)
    a.place(no)
    a.exit(2)
    assert run(a.program(), machine).status == (1 if holds else 2)


def test_results_are_stored_in_four_and_eight_bytes(machine: str) -> None:
    a = Assembler(machine)
    four, eight = a.slot(4), a.slot(8)
    a.sys("openat", -100, "/nonexistent", 0, 0, store=four, skip_any=NEXT)
    a.sys("lseek", -1, 0, 0, store=eight, skip_any=NEXT)
    a.send(1, four, eight)
    a.sys("getppid", store=four)
    a.sys("getppid", store=eight)
    a.send(1, four, eight)
    a.exit(0)
    assert run(a.program(), machine).values == [
        (-errno.ENOENT, -errno.EBADF),
        (os.getpid(), os.getpid()),
    ]


@pytest.mark.parametrize(
    ("path", "status"), [("/", 10), ("/nonexistent", 11), ("/dev/null/x", 12), ("x" * 5000, 13)]
)
def test_success_and_each_errno_jump_to_their_labels(machine: str, path: str, status: int) -> None:
    a = Assembler(machine)
    opened, missing, no_directory, other = (
        a.label(name) for name in ("opened", "missing", "no directory", "other")
    )
    a.sys(
        "openat", -100, path, 0, 0,
        ok=opened, skip={errno.ENOENT: missing, errno.ENOTDIR: no_directory}, skip_any=other,
    )  # fmt: skip
    a.exit(99)
    for code, label in enumerate((opened, missing, no_directory, other), 10):
        a.place(label)
        a.exit(code)
    assert run(a.program(), machine).status == status


def test_each_of_three_errors_jumps_to_its_label(machine: str) -> None:
    for number, (path, flags) in enumerate([("/nonexistent", 0), ("/dev/null/x", 0), ("/", 1)]):
        a = Assembler(machine)
        ways = [a.label(), a.label(), a.label()]
        rules = dict(zip((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), ways, strict=True))
        a.sys("openat", -100, path, flags, 0, skip=rules)
        a.exit(99)
        for code, label in enumerate(ways):
            a.place(label)
            a.exit(code)
        assert run(a.program(), machine).status == number


def test_the_first_rule_that_fits_wins(machine: str) -> None:
    a = Assembler(machine)
    named, other = a.label(), a.label()
    a.sys("close", -1, skip={errno.EBADF: named}, skip_any=other)
    a.place(other)
    a.exit(1)
    a.place(named)
    a.exit(2)
    assert run(a.program(), machine).status == 2


def test_an_error_without_a_rule_is_a_failure_with_its_operation(machine: str) -> None:
    a = Assembler(machine)
    a.sys("getpid")
    a.sys("close", -1, skip={errno.EINVAL: NEXT})
    a.exit(0)
    ended = run(a.program(), machine)
    assert (ended.status, ended.messages) == (125, [(FAILURE, 1, errno.EBADF, 0)])


def test_a_large_positive_result_is_no_error(machine: str) -> None:
    a = Assembler(machine)
    place = a.slot(8)
    a.sys("mmap", 0, 4096, 3, 0x22, -1, 0, store=place)
    wrong = a.label()
    a.compare(place, "lt", 4096, true=wrong)
    a.exit(0)
    a.place(wrong)
    a.exit(1)
    assert run(a.program(), machine).status == 0


def test_retry_ends_when_the_call_succeeds(machine: str) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_inheritable(read, True)
    try:
        a = Assembler(machine)
        buffer = a.data(8)
        got = a.slot(4)
        ready = a.slot(4)
        a.sys("pidfd_open", os.getpid(), 0, store=ready)
        mine = a.slot(4)
        a.sys("pidfd_getfd", ready, read, 0, store=mine)
        a.send(1)
        a.sys("read", mine, buffer, 8, store=got, retry=(errno.EAGAIN, 2_000_000_000))
        a.send(1, got, a.field(buffer, 0, 1))
        a.exit(0)
        launched = Launched(a.program(), machine)
        assert launched.receive()[0]
        time.sleep(0.1)
        os.write(write, b"A")
        assert launched.end().values == [(1, 65)]
    finally:
        os.close(read)
        os.close(write)


def test_retry_is_bounded(machine: str) -> None:
    a = Assembler(machine)
    word = a.data(8)
    wait = a.data(struct.pack("<qq", 0, 30_000_000))
    # FUTEX_WAIT times out after 30 ms: once and four more times
    a.send(1)
    a.sys("futex", word, 0, 0, wait, 0, 0, retry=(errno.ETIMEDOUT, 4))
    a.exit(0)
    start = time.monotonic()
    launched = Launched(a.program(), machine)
    assert launched.receive()[0]
    ready = time.monotonic()
    ended = launched.end()
    assert ended.messages == [(FAILURE, 1, errno.ETIMEDOUT, 0)]
    assert time.monotonic() - start > 0.14 and time.monotonic() - ready < 10


def test_retry_applies_only_to_its_errno(machine: str) -> None:
    a = Assembler(machine)
    a.sys("close", -1, retry=(errno.EAGAIN, 2_000_000_000))
    a.exit(0)
    assert run(a.program(), machine).messages == [(FAILURE, 0, errno.EBADF, 0)]


def test_rules_apply_after_the_last_retry(machine: str) -> None:
    a = Assembler(machine)
    gone = a.label()
    a.sys("close", -1, retry=(errno.EBADF, 3), skip={errno.EBADF: gone})
    a.exit(0)
    a.place(gone)
    a.exit(7)
    assert run(a.program(), machine).status == 7


def test_wait_ends_at_the_byte_of_the_parent(machine: str) -> None:
    a = Assembler(machine)
    a.send(1)
    a.wait()
    a.exit(77)
    launched = Launched(a.program(), machine)
    assert launched.receive()[0]
    launched.release(1)
    assert launched.end().status == 77


def test_wait_ends_the_program_when_the_parent_is_gone(machine: str) -> None:
    a = Assembler(machine)
    a.wait()
    a.exit(0)
    launched = Launched(a.program(), machine)
    launched.socket.close()
    assert launched.process.wait(timeout=20) == 124
    assert launched.process.stdout is not None
    launched.process.stdout.close()


def test_send_ends_the_program_when_the_parent_is_gone(machine: str) -> None:
    a = Assembler(machine)
    a.sys("nanosleep", a.data(struct.pack("<qq", 0, 100_000_000)), 0)
    a.send(1)
    a.exit(0)
    launched = Launched(a.program(), machine)
    launched.socket.close()
    # SIGPIPE ends it; where it is ignored, the launcher itself
    assert launched.process.wait(timeout=20) in (-13, 128 + 13, 124)
    assert launched.process.stdout is not None
    launched.process.stdout.close()


def test_fail_takes_a_number_or_a_slot(machine: str) -> None:
    for value in (5, -5):
        a = Assembler(machine)
        slot = a.slot(4, value)
        a.fail(slot)
        ended = run(a.program(), machine)
        assert (ended.status, ended.messages) == (125, [(FAILURE, 0, value, 0)])


def test_exit_ends_the_process_with_its_code(machine: str) -> None:
    for code in (0, 1, 200):
        a = Assembler(machine)
        a.exit(code)
        assert run(a.program(), machine).status == code


def test_relocated_pointers_reach_the_kernel(machine: str) -> None:
    a = Assembler(machine)
    first, second = a.data(b"hello "), a.data(b"world")
    iovec = a.data(struct.pack("<4Q", 0, 6, 0, 5))
    a.pointer(iovec, first)
    a.pointer(iovec.at(16), second)
    count = a.slot(4)
    a.sys("writev", 1, iovec, 2, store=count)
    a.exit(count)
    ended = run(a.program(), machine)
    assert (ended.output, ended.status) == (b"hello world", 11)


def test_execve_passes_arguments_and_environment(machine: str) -> None:
    a = Assembler(machine)
    a.sys("fcntl", a.sync, 2, 1)
    argv = a.pointers(["sh", "-c", 'echo "$0 $1 $X"', "a", "b c"])
    a.sys("execve", "/bin/sh", argv, a.pointers(["X=y"]))
    a.exit(1)
    ended = run(a.program(), machine)
    assert (ended.output, ended.status, ended.messages) == (b"a b c y\n", 0, [])


def test_a_result_lands_inside_a_structure(machine: str) -> None:
    a = Assembler(machine)
    pair = a.data(8)
    a.sys("pipe2", pair, 0)
    iovec = a.data(struct.pack("<QQ", 0, 3))
    text = a.data(b"abc")
    a.pointer(iovec, text)
    a.sys("writev", a.field(pair, 4, 4), iovec, 1)
    length = a.field(iovec, 8, 8)
    a.sys("read", a.field(pair, 0, 4), text, 2, store=length)
    a.sys("writev", 1, iovec, 1)
    a.exit(0)
    assert run(a.program(), machine).output == b"ab"


def test_the_socket_number_is_in_its_slot(machine: str) -> None:
    a = Assembler(machine)
    message = a.data(struct.pack("<IIqq", 5, 0, 6, 7))
    a.sys("write", a.sync, message, 24)
    a.exit(0)
    assert run(a.program(), machine).messages == [(5, 0, 6, 7)]


def test_descriptors_travel_with_a_message(machine: str) -> None:
    a = Assembler(machine)
    pair = a.data(8)
    a.sys("pipe2", pair, 0)
    macros.send_fd(a, a.field(pair, 0, 4))
    a.sys("write", a.field(pair, 4, 4), "through the pipe", 16)
    a.exit(0)
    ended = run(a.program(), machine)
    assert [message[0] for message in ended.messages] == [4]
    (read,) = ended.fds
    try:
        assert os.read(read, 100) == b"through the pipe"
    finally:
        os.close(read)


def test_a_program_may_have_many_megabytes(machine: str) -> None:
    a = Assembler(machine)
    block = a.data(20 << 20)
    end = a.field(block, (20 << 20) - 8, 8)
    a.set(end, 42)
    a.exit(end)
    assert run(a.program(), machine).status == 42


def test_a_program_may_have_many_operations(machine: str) -> None:
    a = Assembler(machine)
    slot, end = a.slot(8, 0), a.label()
    a.compare(slot, "ne", 0, true=end)
    for number in range(10_000):
        a.set(slot, number)
    a.place(end)
    a.send(1, slot)
    a.exit(0)
    assert run(a.program(), machine).values == [(9999, 0)]
