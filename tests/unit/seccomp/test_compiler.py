"""Tests that a compiled seccomp filter returns the action of its profile for each system call."""

from __future__ import annotations

import errno
import os
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pyrunc.abi.arch import arch
from pyrunc.errors import InvalidSpec
from pyrunc.seccomp import compiler, stub
from pyrunc.seccomp.flatten import flatten, intervals
from pyrunc.seccomp.profile import (
    ALLOW,
    ERRNO,
    KILL_PROCESS,
    KILL_THREAD,
    LOG,
    NOTIFY,
    TRACE,
    TRAP,
    X86,
    X86_64,
    parse,
)
from tests.unit.seccomp.interpreter import run

CALLS = arch("x86_64").syscalls
X32_BIT = 0x40000000
ENOSYS = ERRNO | errno.ENOSYS


def program(profile: dict[str, Any]) -> bytes:
    compiled = compiler.compile(profile, "x86_64", store="")
    assert compiled is not None
    return compiled.program


def profile(*rules: dict[str, Any], default: str = "SCMP_ACT_ERRNO", **more: Any) -> dict[str, Any]:
    return {"defaultAction": default, "syscalls": [*rules], **more}


def rule(
    *names: str,
    action: str = "SCMP_ACT_ALLOW",
    args: list[dict[str, Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {"names": [*names], "action": action, "args": args or [], **more}


def compare(index: int, op: str, value: int, second: int = 0) -> dict[str, Any]:
    return {"index": index, "op": f"SCMP_CMP_{op}", "value": value, "valueTwo": second}


@pytest.mark.parametrize(
    ("action", "errno_ret", "answer"),
    [
        ("SCMP_ACT_KILL", None, KILL_THREAD),
        ("SCMP_ACT_KILL_THREAD", None, KILL_THREAD),
        ("SCMP_ACT_KILL_PROCESS", None, KILL_PROCESS),
        ("SCMP_ACT_TRAP", None, TRAP),
        ("SCMP_ACT_ERRNO", None, ERRNO | errno.EPERM),
        ("SCMP_ACT_ERRNO", 38, ERRNO | 38),
        ("SCMP_ACT_ERRNO", 0, ERRNO),
        ("SCMP_ACT_TRACE", 7, TRACE | 7),
        ("SCMP_ACT_LOG", None, LOG),
    ],
)
def test_every_action_has_its_answer(action: str, errno_ret: int | None, answer: int) -> None:
    more: dict[str, Any] = {} if errno_ret is None else {"errnoRet": errno_ret}
    compiled = program(profile(rule("mkdir", action=action, **more), default="SCMP_ACT_ALLOW"))
    assert run(compiled, CALLS["mkdir"]) == answer
    assert run(compiled, CALLS["read"]) == ALLOW


@pytest.mark.parametrize(
    ("condition", "matching", "other"),
    [
        (compare(0, "NE", 5), [4, 1 << 40], [5]),
        (compare(0, "LT", 1 << 33), [0, (1 << 33) - 1], [1 << 33, 1 << 40]),
        (compare(0, "LE", 5), [5, 0], [6, 1 << 32]),
        (compare(0, "EQ", (1 << 32) | 5), [(1 << 32) | 5], [5, 1 << 32]),
        (compare(0, "GE", 5), [5, 1 << 32], [4]),
        (compare(0, "GT", 5), [6, 1 << 32], [5]),
        (compare(0, "MASKED_EQ", 0xF0, 0x10), [0x1F, 0x10], [0x20, 0x0F]),
    ],
)
def test_every_comparison_looks_at_64_bits(
    condition: dict[str, Any], matching: list[int], other: list[int]
) -> None:
    compiled = program(profile(rule("read", args=[condition])))
    assert [run(compiled, CALLS["read"], [value]) for value in matching] == [ALLOW] * len(matching)
    assert [run(compiled, CALLS["read"], [value]) for value in other] == [
        ERRNO | errno.EPERM
    ] * len(other)


def test_conditions_on_different_arguments_must_all_hold() -> None:
    compiled = program(profile(rule("read", args=[compare(0, "EQ", 1), compare(2, "EQ", 9)])))
    assert run(compiled, CALLS["read"], [1, 0, 9]) == ALLOW
    assert run(compiled, CALLS["read"], [1, 0, 8]) != ALLOW
    assert run(compiled, CALLS["read"], [2, 0, 9]) != ALLOW


def test_conditions_on_the_same_argument_are_alternatives() -> None:
    compiled = program(profile(rule("read", args=[compare(0, "EQ", 1), compare(0, "EQ", 2)])))
    assert [run(compiled, CALLS["read"], [value]) == ALLOW for value in (0, 1, 2, 3)] == [
        False,
        True,
        True,
        False,
    ]


def test_calls_newer_than_the_profile_answer_enosys() -> None:
    compiled = program(profile(rule("read", "statx")))
    assert run(compiled, CALLS["statx"] + 1) == ENOSYS
    assert run(compiled, 999) == ENOSYS
    assert run(compiled, CALLS["mkdir"]) == ERRNO | errno.EPERM


def test_a_default_that_allows_needs_no_stub() -> None:
    compiled = program(profile(rule("read", action="SCMP_ACT_ERRNO"), default="SCMP_ACT_ALLOW"))
    assert run(compiled, 999) == ALLOW


def test_calls_that_libseccomp_may_not_know_are_judged_by_number() -> None:
    compiled = program(
        profile(
            rule("read", "fchmodat2", "mseal"),
            rule("listmount", action="SCMP_ACT_ERRNO", errnoRet=5),
        )
    )
    assert run(compiled, 452) == ALLOW and run(compiled, 462) == ALLOW
    assert run(compiled, 458) == ERRNO | 5
    assert run(compiled, 451) == ERRNO | errno.EPERM and run(compiled, 463) == ENOSYS


def test_a_foreign_architecture_is_killed_unless_listed() -> None:
    assert run(program(profile(rule("read"))), 3, architecture=X86) == KILL_THREAD
    compiled = program(profile(rule("read"), architectures=["SCMP_ARCH_X86"]))
    assert run(compiled, 3, architecture=X86) == ALLOW  # read is 3 there
    assert run(compiled, CALLS["read"], architecture=X86_64) == ALLOW
    assert run(compiled, 900, architecture=X86) == ENOSYS


def test_x32_numbers_do_not_pass_as_native_numbers() -> None:
    compiled = program(profile(rule("read")))
    assert run(compiled, CALLS["read"] | X32_BIT) == KILL_THREAD
    listed = program(profile(rule("read"), architectures=["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"]))
    assert run(listed, CALLS["read"] | X32_BIT) == ALLOW
    assert (
        run(listed, CALLS["mkdir"] | X32_BIT) == ERRNO | errno.EPERM
        or run(listed, CALLS["mkdir"] | X32_BIT) == ENOSYS
    )
    assert run(listed, 700 | X32_BIT) == ENOSYS


def test_unknown_names_are_left_out() -> None:
    assert run(program(profile(rule("read", "no_such_call_ever"))), CALLS["read"]) == ALLOW


def test_notify_asks_for_a_listener() -> None:
    compiled = compiler.compile(
        profile(rule("mkdir", action="SCMP_ACT_NOTIFY"), default="SCMP_ACT_ALLOW",
        listenerPath="/run/l", listenerMetadata="m"),
        "x86_64",
        store="",
    )  # fmt: skip
    assert compiled is not None and compiled.notifies and compiled.flags & 8
    assert run(compiled.program, CALLS["mkdir"]) == NOTIFY


@pytest.mark.parametrize(
    ("seccomp", "words"),
    [
        (profile(default="SCMP_ACT_NOTIFY"), "cannot be used as default action"),
        (
            profile(rule("write", action="SCMP_ACT_NOTIFY"), listenerPath="/l"),
            "for the write syscall",
        ),
        (profile(rule("mkdir", action="SCMP_ACT_NOTIFY")), "listenerPath"),
        (profile(rule("mkdir"), listenerMetadata="m"), "listenerMetadata"),
        (profile(rule("mkdir", action="SCMP_ACT_MAYBE")), r"syscalls\[0\]\.action"),
        (profile(rule()), r"syscalls\[0\]\.names"),
        (profile(rule("mkdir", errnoRet=1)), "errnoRet is not allowed with SCMP_ACT_ALLOW"),
        (profile(rule("mkdir", args=[compare(6, "EQ", 0)])), r"args\[0\]\.index"),
        (profile(rule("mkdir", args=[compare(0, "XX", 0)])), r"args\[0\]\.op"),
        (profile(rule("mkdir", args=[compare(0, "EQ", -1)])), r"args\[0\]\.value"),
        (profile(architectures=["SCMP_ARCH_VAX"]), r"architectures\[0\]"),
        (profile(flags=["SECCOMP_FILTER_FLAG_X"]), r"flags\[0\]"),
    ],
)
def test_faults_are_reported_with_their_path(seccomp: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        compiler.compile(seccomp, store="")


def test_an_empty_object_filters_nothing() -> None:
    assert compiler.compile({}, store="") is None


def test_absent_and_empty_flags_differ() -> None:
    absent = compiler.compile(profile(rule("read")), store="")
    empty = compiler.compile(profile(rule("read"), flags=[]), store="")
    assert absent is not None and absent.flags == 4
    assert empty is not None and empty.flags == 0


def test_the_store_saves_the_work_and_is_not_trusted_when_others_can_write(tmp_path: Path) -> None:
    store, seccomp = tmp_path / "store", profile(rule("read", "getcwd"))
    first = compiler.compile(seccomp, store=str(store))
    (file,) = store.iterdir()
    assert first is not None and file.read_bytes() == first.program
    file.write_bytes(b"\x06\0\0\0\0\0\xff\x7f")  # ret ALLOW: what an attacker would put there
    compiler._filters.clear()
    poisoned = compiler.compile(seccomp, store=str(store))
    # found again, as the folder is ours alone
    assert poisoned is not None and poisoned.program != first.program
    store.chmod(0o777)
    compiler._filters.clear()
    fresh = compiler.compile(seccomp, store=str(store))
    assert fresh is not None and fresh.program == first.program
    compiler._filters.clear()


def test_the_store_stays_small(tmp_path: Path) -> None:
    for number in range(compiler.STORE_LIMIT_FILES + 5):
        compiler._save(str(tmp_path), number.to_bytes(20), b"x" * 8)
    assert len(os.listdir(tmp_path)) <= compiler.STORE_LIMIT_FILES


@pytest.mark.skipif("PYRUNC_GUEST" in os.environ, reason="emulated processors have no speed")
def test_a_known_profile_costs_less_than_a_tenth_of_a_millisecond() -> None:
    from pyrunc.seccomp.default import runtime_default

    seccomp = runtime_default([], "x86_64")
    compiler.compile(seccomp, "x86_64", store="")
    best_s = min(_time(lambda: compiler.compile(seccomp, "x86_64", store="")) for _ in range(200))
    assert best_s < 0.0001


def _time(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _random_profile(random: Random) -> dict[str, Any]:
    names = sorted(CALLS)
    actions = [
        "SCMP_ACT_ALLOW",
        "SCMP_ACT_ERRNO",
        "SCMP_ACT_TRAP",
        "SCMP_ACT_LOG",
        "SCMP_ACT_KILL_PROCESS",
    ]
    chosen, rules = random.sample(names, 120), []
    for start in range(0, 120, 12):
        args = [
            compare(
                random.randrange(6),
                random.choice(["EQ", "NE", "LT", "GE"]),
                random.choice([0, 5, 1 << 33]),
            )
        ]
        rules.append(
            rule(
                *chosen[start : start + 12],
                action=random.choice(actions),
                args=args if random.random() < 0.4 else [],
            )
        )
    architectures = random.choice([[], ["SCMP_ARCH_X86"], ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]])
    return profile(*rules, default=random.choice(actions), architectures=architectures)


@pytest.mark.parametrize("seed", range(12))
def test_the_flat_program_has_the_results_of_the_whole_program(seed: int) -> None:
    random = Random(seed)
    parsed = parse(_random_profile(random))
    assert parsed is not None
    native = [X86_64, *parsed.architectures]
    conditional = {r.name for r in parsed.rules if r.conditions}
    prologue = stub.prologue(
        compiler._highest(parsed, native),
        compiler._verdicts(parsed),
        stub.is_needed(parsed.default_action),
    )
    whole = prologue + compiler._compile_rules(
        parsed.default_action, parsed.rules, native, "x86_64"
    )
    rest = compiler._compile_rules(
        parsed.default_action, [r for r in parsed.rules if r.name in conditional], native, "x86_64"
    )
    flat = flatten(whole, rest, native)
    numbers = [*range(480), *(n | X32_BIT for n in range(560)), 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF]
    for architecture in (X86_64, X86, 0xC00000B7):
        for number in numbers:
            values = [
                random.choice([0, 5, 6, 1 << 33, (1 << 33) + 1, (1 << 64) - 1]) for _ in range(6)
            ]
            expected = run(whole, number, values, architecture)
            assert run(flat, number, values, architecture) == expected, (
                hex(architecture),
                number,
                values,
            )


def test_flat_programs_are_short() -> None:
    from pyrunc.seccomp.default import runtime_default

    result = compiler.compile(runtime_default([], "x86_64"), "x86_64", store="")
    assert result is not None
    assert len(result.program) // 8 < 700  # 1312 instructions as libseccomp lays it out


def test_intervals_cover_all_numbers_once() -> None:
    parts = intervals(program(profile(rule("read", "write", "statx"))), X86_64)
    assert parts[0][0] == 0 and parts[-1][1] == 0xFFFFFFFF
    assert all(left[1] + 1 == right[0] and left[2] != right[2] for left, right in pairwise(parts))
