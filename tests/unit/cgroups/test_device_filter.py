"""Tests the eBPF program of the device rules: interpreted here, it decides as the rules do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrunc.cgroups import device_filter as filter
from pyrunc.errors import InvalidSpec

BLOCK, CHARACTER = 1, 2
MKNOD, READ, WRITE = 1, 2, 4


def execute(code: list[filter.Instruction], kind: int, major: int, minor: int, bits: int) -> int:
    """Run the eBPF program on one access to a device, as the kernel does; return its verdict."""
    context = {0: bits << 16 | kind, 4: major, 8: minor}
    registers, at = [0] * 11, 0
    for _ in range(len(code) + 1):
        opcode, to, source, offset, value = code[at]
        at += 1
        if opcode == filter.LOAD32:
            registers[to] = context[offset]
        elif opcode == filter.MOVE32:
            registers[to] = registers[source]
        elif opcode == filter.MOVE64:
            registers[to] = value
        elif opcode == filter.AND32:
            registers[to] &= value & 0xFFFFFFFF
        elif opcode == filter.SHIFT_RIGHT32:
            registers[to] >>= value
        elif opcode == filter.JUMP_NOT_EQUAL:
            at += offset if registers[to] != value % (1 << 64) else 0
        elif opcode == filter.JUMP_IF_SET:
            at += offset if registers[to] & value else 0
        elif opcode == filter.JUMP:
            at += offset
        else:
            assert opcode == filter.EXIT
            return registers[0]
    raise AssertionError("the program does not end")


def matches(rule: filter.DeviceRule, kind: int, major: int, minor: int) -> bool:
    return rule.kind in (0, kind) and rule.major in (None, major) and rule.minor in (None, minor)


def allowed(
    rules: Sequence[filter.DeviceRule], kind: int, major: int, minor: int, bits: int
) -> bool:
    """Return whether the rules allow an access. The eBPF program must decide the same."""
    for rule in reversed(rules):
        if matches(rule, kind, major, minor):
            if not rule.allow and bits & rule.bits:
                return False
            if rule.allow:
                bits &= ~rule.bits
            if not bits:
                return True
    return False


numbers = st.sampled_from([0, 1, 3, 5, 10, 136, 200, 4095])
rules = st.builds(
    lambda allow, kind, major, minor, access: {
        "allow": allow, "type": kind, "major": major, "minor": minor,
        "access": "".join(sorted(access))
    },
    st.booleans(),
    st.sampled_from(["a", "b", "c"]),
    st.none() | numbers,
    st.none() | numbers,
    st.sets(st.sampled_from("rwm"), min_size=1),
)  # fmt: skip


@given(
    st.lists(rules, max_size=8),
    st.sampled_from([BLOCK, CHARACTER]),
    numbers,
    numbers,
    st.integers(1, 7),
)
def test_the_program_agrees_with_the_definition(
    devices: list[dict[str, Any]], kind: int, major: int, minor: int, bits: int
) -> None:
    parsed = [*filter.parse(devices), *filter.DEFAULTS]
    code = filter.assemble(parsed)
    assert execute(code, kind, major, minor, bits) == allowed(parsed, kind, major, minor, bits)


@given(
    st.lists(rules, max_size=6),
    st.sampled_from([BLOCK, CHARACTER]),
    numbers,
    numbers,
    st.sampled_from([1, 2, 4]),
)
def test_the_last_rule_with_a_permission_decides(
    devices: list[dict[str, Any]], kind: int, major: int, minor: int, bit: int
) -> None:
    parsed = filter.parse(devices)
    deciding = [rule for rule in parsed if matches(rule, kind, major, minor) and rule.bits & bit]
    assert allowed(parsed, kind, major, minor, bit) == (deciding[-1].allow if deciding else False)


def answer(devices: list[dict[str, Any]], kind: int, major: int, minor: int, bits: int) -> int:
    return execute(
        filter.assemble([*filter.parse(devices), *filter.DEFAULTS]), kind, major, minor, bits
    )


DENY_ALL = {"allow": False, "access": "rwm"}


def test_deny_all_still_leaves_the_default_nodes() -> None:
    for major, minor in (
        (1, 3),
        (1, 5),
        (1, 7),
        (1, 8),
        (1, 9),
        (5, 0),
        (5, 2),
        (136, 77),
        (10, 200),
    ):
        assert answer([DENY_ALL], CHARACTER, major, minor, READ | WRITE)
    assert not answer([DENY_ALL], BLOCK, 8, 0, READ)
    assert answer([DENY_ALL], BLOCK, 8, 0, MKNOD)


def test_a_partial_deny_holds_behind_a_wider_allow() -> None:
    rules = [{"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rwm"},
             {"allow": False, "type": "c", "major": 10, "minor": 229, "access": "w"}]  # fmt: skip
    assert answer(rules, CHARACTER, 10, 229, READ)
    assert not answer(rules, CHARACTER, 10, 229, READ | WRITE)


def test_rights_add_up_over_rules() -> None:
    rules = [
        DENY_ALL,
        {"allow": True, "type": "b", "access": "r"},
        {"allow": True, "type": "b", "access": "w"},
    ]
    assert answer(rules, BLOCK, 8, 1, READ | WRITE)


@pytest.mark.parametrize(
    ("device", "where"),
    [
        ({"allow": True}, "access"),
        ({"allow": True, "access": ""}, "access"),
        ({"allow": True, "access": "rx"}, "access"),
        ({"allow": True, "type": "p", "access": "r"}, "type"),
    ],
)
def test_broken_rules_are_refused_with_their_place(device: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"linux\.resources\.devices\[1\]\.{where}"):
        filter.parse([DENY_ALL, device])


def test_huge_numbers_fit_the_instruction() -> None:
    assert filter.program(
        [{"allow": True, "type": "c", "major": 0xFFFFFFFF, "minor": 0xFFFFFFFF, "access": "r"}]
    )
