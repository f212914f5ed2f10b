"""Compiles OCI `resources.devices` to an eBPF filter. For each access bit (mknod, read, write), the
last rule that names it decides.

The filter walks the rules from the last to the first with the set of access bits that are still
undecided. An allow rule removes its bits from the set; once the set is empty, the access is
allowed. The access is refused if a deny rule names an undecided bit, or if a bit is undecided at
the end. The defaults that every container gets are added after the caller's rules. Source:
runtime-spec config-linux.md, uapi bpf.h (struct bpf_cgroup_dev_ctx).
"""

from __future__ import annotations

from pyrunc.errors import InvalidSpec
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

ACCESS = {"m": 1, "r": 2, "w": 4}
ALL = 7
TYPES = {"a": 0, "b": 1, "c": 2, "u": 2}
WHERE = "linux.resources.devices"

# eBPF: opcodes of the instructions in use, and the registers' contents.
LOAD32, MOVE64, MOVE32, AND32, SHIFT_RIGHT32 = 0x61, 0xB7, 0xBC, 0x54, 0x74
JUMP_NOT_EQUAL, JUMP_IF_SET, JUMP, EXIT = 0x55, 0x45, 0x05, 0x95
RESULT, CONTEXT, TYPE, BITS, MAJOR, MINOR = 0, 1, 2, 3, 4, 5

Instruction = tuple[int, int, int, int, int]  # opcode, destination, source, jump offset, immediate


class DeviceRule(Value):
    """A device rule.

    - `kind`: 0 any device, 1 block, 2 character
    - `major`, `minor`: None for any number
    - `bits`: the sum of the access bits, which are 1 mknod, 2 read, 4 write
    """

    allow: bool
    kind: int
    major: int | None
    minor: int | None
    bits: int

    @property
    def everything(self) -> bool:
        """Return whether the rule matches every access to every device, so that the rules before it
        have no effect."""
        return self.kind == 0 and self.major is None and self.minor is None and self.bits == ALL


DEFAULTS = (
    # Making any node is allowed, as in runc: opening it still needs a rule.
    DeviceRule(True, 2, None, None, ACCESS["m"]),
    DeviceRule(True, 1, None, None, ACCESS["m"]),
    # null zero full random urandom
    *(DeviceRule(True, 2, 1, minor, ALL) for minor in (3, 5, 7, 8, 9)),
    DeviceRule(True, 2, 5, 0, ALL),  # tty
    DeviceRule(True, 2, 5, 2, ALL),  # ptmx
    DeviceRule(True, 2, 136, None, ALL),  # pts/*
    DeviceRule(True, 2, 10, 200, ALL),  # net/tun
)


def parse(devices: Sequence[Mapping[str, Any]]) -> list[DeviceRule]:
    """Parse OCI device rules. A missing type or number matches any. Raises InvalidSpec."""
    rules = []
    for index, device in enumerate(devices):
        where = f"{WHERE}[{index}]"
        kind, access = device.get("type") or "a", device.get("access") or ""
        if kind not in TYPES:
            raise InvalidSpec(f"{where}.type", f"{kind!r} is not one of a, b, c, u")
        if not access or set(access) - set(ACCESS):
            raise InvalidSpec(f"{where}.access", f"{access!r} is not made of r, w and m")
        bits = sum(ACCESS[letter] for letter in set(access))
        rules.append(
            DeviceRule(
                bool(device.get("allow")),
                TYPES[kind],
                _number(device, "major"),
                _number(device, "minor"),
                bits,
            )
        )
    return rules


def _number(device: Mapping[str, Any], key: str) -> int | None:
    value = device.get(key)
    return None if value is None or value < 0 else int(value)


def program(devices: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the filter for the caller's rules and the defaults, as eBPF instructions. Raises
    InvalidSpec."""
    if isinstance(devices, str) or any(not hasattr(rule, "get") for rule in devices):
        raise InvalidSpec("linux.resources.devices", "must be a list of objects")
    from pyrunc.kernel.bpf import INSTRUCTION

    code = assemble([*parse(devices), *DEFAULTS])
    return b"".join(
        INSTRUCTION.pack(opcode, destination | source << 4, offset, immediate)
        for opcode, destination, source, offset, immediate in code
    )


def assemble(rules: Sequence[DeviceRule]) -> list[Instruction]:
    """Return the filter's instructions for `rules`, from the last rule to the first. Rules before a
    rule that matches everything are left out."""
    code: list[Instruction] = [
        (LOAD32, TYPE, CONTEXT, 0, 0),
        (MOVE32, BITS, TYPE, 0, 0),
        # access_type has the access in its upper 16 bits and the device type in the lower (struct
        # bpf_cgroup_dev_ctx).
        (AND32, TYPE, 0, 0, 0xFFFF),
        (SHIFT_RIGHT32, BITS, 0, 0, 16),
        (LOAD32, MAJOR, CONTEXT, 4, 0),
        (LOAD32, MINOR, CONTEXT, 8, 0),
    ]
    for rule in reversed(rules):
        # The verifier refuses unreachable code (EINVAL), so earlier rules must not follow.
        if rule.everything:
            return code + _answer_code(int(rule.allow))
        code += _rule_code(rule)
    return code + _answer_code(0)


def _rule_code(rule: DeviceRule) -> list[Instruction]:
    """Return the instructions of one rule. For a device that the rule does not match, they jump to
    the next rule."""
    body: list[Instruction] = []
    if not rule.allow:
        body += [(JUMP_IF_SET, BITS, 0, 1, rule.bits), (JUMP, 0, 0, 2, 0), *_answer_code(0)]
    elif rule.bits == ALL:
        body += _answer_code(1)
    else:
        body += [
            (AND32, BITS, 0, 0, ALL & ~rule.bits),
            (JUMP_NOT_EQUAL, BITS, 0, 2, 0),
            *_answer_code(1),
        ]
    tests = [(TYPE, rule.kind or None), (MAJOR, rule.major), (MINOR, rule.minor)]
    for register, value in reversed(tests):
        if value is not None:
            body.insert(0, (JUMP_NOT_EQUAL, register, 0, len(body), _signed(value)))
    return body


def _answer_code(value: int) -> list[Instruction]:
    return [(MOVE64, RESULT, 0, 0, value), (EXIT, 0, 0, 0, 0)]


def _signed(value: int) -> int:
    # The field is signed. No device has such a number: a major has 12 bits, a minor 20.
    return value - (1 << 32) if value >= 1 << 31 else value
