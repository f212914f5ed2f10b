"""Parses and checks an OCI `linux.seccomp` object: actions, rules with conditions, architectures,
flags, the listener.

Two conditions on one argument mean "either", so such a rule becomes one rule per condition.
Conditions on different arguments mean "both". Rules with the default action are dropped. Source:
runtime-spec config-linux.md, seccomp(2).
"""

from __future__ import annotations

import errno

from pyrunc.errors import InvalidSpec
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

WHERE = "linux.seccomp"

KILL_PROCESS, KILL_THREAD, TRAP, ERRNO = 0x80000000, 0x0, 0x30000, 0x50000
NOTIFY, TRACE, LOG, ALLOW = 0x7FC00000, 0x7FF00000, 0x7FFC0000, 0x7FFF0000
ACTIONS = {
    "SCMP_ACT_KILL": KILL_THREAD,
    "SCMP_ACT_KILL_THREAD": KILL_THREAD,
    "SCMP_ACT_KILL_PROCESS": KILL_PROCESS,
    "SCMP_ACT_TRAP": TRAP,
    "SCMP_ACT_ERRNO": ERRNO,
    "SCMP_ACT_TRACE": TRACE,
    "SCMP_ACT_ALLOW": ALLOW,
    "SCMP_ACT_LOG": LOG,
    "SCMP_ACT_NOTIFY": NOTIFY,
}
WITH_VALUE = (ERRNO, TRACE)
RULES_LIMIT = 16384  # more than a program of 4096 instructions, the kernel's limit, can hold
OPERATORS = {
    "SCMP_CMP_NE": 1,
    "SCMP_CMP_LT": 2,
    "SCMP_CMP_LE": 3,
    "SCMP_CMP_EQ": 4,
    "SCMP_CMP_GE": 5,
    "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": 7,
}
MASKED_EQ = 7

# AUDIT_ARCH_* of linux/audit.h; x32 shares x86_64's, and libseccomp's own number for it lacks the
# 64-bit mark.
X86_64, X86, X32, ARM, AARCH64 = 0xC000003E, 0x40000003, 0x4000003E, 0x40000028, 0xC00000B7
ARCHITECTURES = {
    "SCMP_ARCH_X86": X86,
    "SCMP_ARCH_X86_64": X86_64,
    "SCMP_ARCH_X32": X32,
    "SCMP_ARCH_ARM": ARM,
    "SCMP_ARCH_AARCH64": AARCH64,
    "SCMP_ARCH_MIPS": 0x00000008,
    "SCMP_ARCH_MIPS64": 0x80000008,
    "SCMP_ARCH_MIPS64N32": 0xA0000008,
    "SCMP_ARCH_MIPSEL": 0x40000008,
    "SCMP_ARCH_MIPSEL64": 0xC0000008,
    "SCMP_ARCH_MIPSEL64N32": 0xE0000008,
    "SCMP_ARCH_PPC": 0x00000014,
    "SCMP_ARCH_PPC64": 0x80000015,
    "SCMP_ARCH_PPC64LE": 0xC0000015,
    "SCMP_ARCH_S390": 0x00000016,
    "SCMP_ARCH_S390X": 0x80000016,
    "SCMP_ARCH_PARISC": 0x0000000F,
    "SCMP_ARCH_PARISC64": 0x8000000F,
    "SCMP_ARCH_RISCV64": 0xC00000F3,
    "SCMP_ARCH_LOONGARCH64": 0xC0000102,
    "SCMP_ARCH_M68K": 0x00000004,
    "SCMP_ARCH_SH": 0x4000002A,
    "SCMP_ARCH_SHEB": 0x0000002A,
}
NATIVE = {"x86_64": X86_64, "aarch64": AARCH64}

FLAGS = {
    "SECCOMP_FILTER_FLAG_TSYNC": 1,
    "SECCOMP_FILTER_FLAG_LOG": 2,
    "SECCOMP_FILTER_FLAG_SPEC_ALLOW": 4,
    "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV": 0x20,
}
TSYNC, SPEC_ALLOW, NEW_LISTENER, WAIT_KILLABLE_RECV = 1, 4, 8, 0x20


class SeccompRule:
    """The action for one system call if all `conditions` hold; without conditions it always
    applies. A condition is (index of the argument, comparison, a, b) as in libseccomp."""

    __slots__ = ("action", "conditions", "name")

    def __init__(
        self, name: str, action: int, conditions: tuple[tuple[int, int, int, int], ...] = ()
    ) -> None:
        self.name, self.action, self.conditions = name, action, conditions


class SeccompProfile(Value):
    """A checked profile.

    - `rules`: those whose action is not the default
    - `names`: every call that the profile names
    - `flags`: None if the profile has no flags
    - `notifies`: a listener in user space answers some calls
    """

    default_action: int
    rules: list[SeccompRule]
    names: frozenset[str]
    architectures: list[int]
    flags: int | None
    notifies: bool


def parse(seccomp: Mapping[str, Any]) -> SeccompProfile | None:
    """Parse the profile. None when it has neither a default action nor rules. Raises
    InvalidSpec."""
    if not seccomp.get("defaultAction") and not seccomp.get("syscalls"):
        return None
    default = _action(
        seccomp.get("defaultAction"), seccomp.get("defaultErrnoRet"), f"{WHERE}.defaultAction"
    )
    if default == NOTIFY:
        raise InvalidSpec(
            f"{WHERE}.defaultAction", "SCMP_ACT_NOTIFY cannot be used as default action"
        )
    rules = _all_rules(seccomp.get("syscalls") or [])
    return SeccompProfile(
        default,
        # libseccomp refuses such a rule with EACCES (seccomp_rule_add(3)).
        [rule for rule in rules if rule.action != default],
        frozenset(rule.name for rule in rules),
        [
            _architecture(name, index)
            for index, name in enumerate(seccomp.get("architectures") or [])
        ],
        _flags(seccomp.get("flags")),
        _notifies(seccomp, rules),
    )


def _notifies(seccomp: Mapping[str, Any], rules: list[SeccompRule]) -> bool:
    """Return whether a rule has SCMP_ACT_NOTIFY. Raises InvalidSpec when the rule is for write(2)
    or there is no listenerPath, and for listenerMetadata without a listenerPath."""
    path = seccomp.get("listenerPath")
    if seccomp.get("listenerMetadata") and not path:
        raise InvalidSpec(f"{WHERE}.listenerMetadata", "needs a listenerPath")
    if not any(rule.action == NOTIFY for rule in rules):
        return False
    # The process tells its parent the number of the listener by write(2): with that call filtered,
    # both would wait for ever (as in runc).
    if any(rule.action == NOTIFY and rule.name == "write" for rule in rules):
        raise InvalidSpec(
            f"{WHERE}.syscalls", "SCMP_ACT_NOTIFY cannot be used for the write syscall"
        )
    if not path:
        raise InvalidSpec(f"{WHERE}.listenerPath", "is required when SCMP_ACT_NOTIFY is used")
    return True


def _all_rules(items: list[Mapping[str, Any]]) -> list[SeccompRule]:
    """Return all rules. Raises InvalidSpec for more than RULES_LIMIT, because a short object can
    make many rules: one for each of its names and conditions."""
    rules: list[SeccompRule] = []
    for index, item in enumerate(items):
        for rule in _rules(item, index):
            rules.append(rule)
            if len(rules) > RULES_LIMIT:
                raise InvalidSpec(f"{WHERE}.syscalls", f"more than {RULES_LIMIT} rules")
    return rules


def _rules(item: Mapping[str, Any], index: int) -> Iterator[SeccompRule]:
    where = f"{WHERE}.syscalls[{index}]"
    names = item.get("names")
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidSpec(f"{where}.names", "must hold at least one name")
    action = _action(item.get("action"), item.get("errnoRet"), f"{where}.action")
    groups = _alternatives(
        [_condition(arg, f"{where}.args[{n}]") for n, arg in enumerate(item.get("args") or [])]
    )
    for name in names:
        for conditions in groups:
            yield SeccompRule(name, action, conditions)


def _alternatives(
    conditions: list[tuple[int, int, int, int]],
) -> list[tuple[tuple[int, int, int, int], ...]]:
    """Return groups of conditions; a call matches if all conditions of one group hold. There is one
    group, or one group per condition when an argument is named twice."""
    arguments = [condition[0] for condition in conditions]
    if len(set(arguments)) < len(arguments):
        # As in runc, which makes a rule of each.
        return [(condition,) for condition in conditions]
    return [tuple(conditions)]


def _condition(arg: Mapping[str, Any], where: str) -> tuple[int, int, int, int]:
    index, operator = arg.get("index", 0), arg.get("op")
    if not isinstance(index, int) or not 0 <= index <= 5:
        raise InvalidSpec(f"{where}.index", f"{index!r} is not in 0..5")
    if operator not in OPERATORS:
        raise InvalidSpec(f"{where}.op", f"{operator!r} is not one of {', '.join(OPERATORS)}")
    value, second = (_uint64(arg.get(key, 0), f"{where}.{key}") for key in ("value", "valueTwo"))
    return (index, OPERATORS[operator], value, second if OPERATORS[operator] == MASKED_EQ else 0)


def _uint64(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise InvalidSpec(where, f"{value!r} is not an unsigned 64-bit number")
    return value


def _action(name: object, value: object, where: str) -> int:
    if not isinstance(name, str) or name not in ACTIONS:
        raise InvalidSpec(where, f"{name!r} is not one of {', '.join(ACTIONS)}")
    action = ACTIONS[name]
    if value is None:
        # runtime-spec: errnoRet is EPERM when it is absent.
        return action | errno.EPERM if action in WITH_VALUE else action
    if action not in WITH_VALUE:
        raise InvalidSpec(where, f"errnoRet is not allowed with {name}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0xFFFF:
        raise InvalidSpec(where, f"errnoRet {value!r} is not in 0..65535")
    return action | value


def _architecture(name: object, index: int) -> int:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InvalidSpec(
            f"{WHERE}.architectures[{index}]", f"{name!r} is not a known architecture"
        )
    return ARCHITECTURES[name]


def _flags(names: object) -> int | None:
    if names is None:
        return None
    if not isinstance(names, list | tuple):
        raise InvalidSpec(f"{WHERE}.flags", "is not a list")
    flags = 0
    for index, name in enumerate(names):
        if name not in FLAGS:
            raise InvalidSpec(
                f"{WHERE}.flags[{index}]", f"{name!r} is not one of {', '.join(FLAGS)}"
            )
        flags |= FLAGS[name]
    return flags
