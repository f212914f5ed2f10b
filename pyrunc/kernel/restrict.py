"""A process gives up what it can do, for good: capabilities, the file system (landlock), system
calls (a seccomp filter).

For our own helpers that meet hostile bytes. A container's filter is compiled from its profile;
these are a list of calls that are refused with EPERM, or of those that are not. Sources: capset(2),
landlock(7), seccomp(2). One thread only: each call is about the caller.
"""

from __future__ import annotations

import errno
from struct import Struct, pack

from pyrunc.abi.arch import arch
from pyrunc.abi.capability import CAPABILITIES
from pyrunc.abi.prctl import PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER
from pyrunc.kernel.call import address, buffer, raw, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CAPABILITY_VERSION_3 = 0x20080522
_VERSION_QUERY, _RULE_PATH_BENEATH = 1, 1
# All file system rights of each ABI version up to it: ABI 1 has 13, 2 REFER, 3 TRUNCATE, 5
# IOCTL_DEV.
_FILE_RIGHTS = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
_NEWEST_FILE_RIGHTS = 5
_BIND_AND_CONNECT_TCP = 3  # since ABI 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 3  # since ABI 6
_INSTRUCTION = Struct("=HBBI")
_LOAD, _EQUALS, _AT_LEAST, _RETURN = (
    0x20,
    0x15,
    0x35,
    0x06,
)  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_X32 = 0x40000000  # x86-64's second numbering of the same calls
# Of struct seccomp_data; of the second argument the half that an int is in, on the little-endian
# machines that we know.
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _SECOND_OFFSET = 0, 4, 24
_TO_END = -1
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


def no_new_privileges() -> None:
    """prctl(PR_SET_NO_NEW_PRIVS): no execve gains anything any more; seccomp and landlock ask for
    it."""
    syscall("prctl", "PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def keep_capabilities(names: Iterable[str]) -> None:
    """capset(2): permitted and effective become those of `names` that we have; the inheritable ones
    go."""
    header = pack("=Ii", _CAPABILITY_VERSION_3, 0)
    now = buffer(24)
    syscall("capget", "our capabilities", header, now)
    wanted = sum(1 << CAPABILITIES[name] for name in names)
    low, high = wanted & 0xFFFFFFFF, wanted >> 32
    permitted = [int.from_bytes(now[at : at + 4], "little") for at in (4, 16)]
    low, high = low & permitted[0], high & permitted[1]
    syscall("capset", "our capabilities", header, pack("=6I", low, low, 0, high, high, 0))


def only_beneath(folder_fds: Iterable[int]) -> bool:
    """landlock(7): from now on files are opened, made and removed beneath these directories only,
    no TCP is bound or connected, and no signal or abstract socket reaches beyond this process's
    descendants, as far as the kernel knows these.

    Descriptors that are open already keep working. False if the kernel has no landlock.
    """
    version = raw("landlock_create_ruleset", None, 0, _VERSION_QUERY)
    if version < 0:
        return False
    rights = _FILE_RIGHTS[min(version, _NEWEST_FILE_RIGHTS)]
    attributes = pack("=3Q", rights, _BIND_AND_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = syscall("landlock_create_ruleset", "", attributes, size, 0)
    try:
        for fd in folder_fds:
            rule = pack("=Qi", rights, fd)
            syscall("landlock_add_rule", f"fd {fd}", ruleset, _RULE_PATH_BENEATH, rule, 0)
        syscall("landlock_restrict_self", "", ruleset, 0)
    finally:
        _close(ruleset)
    return True


def refusing(names: Iterable[str], commands: Mapping[str, Sequence[int]]) -> bytes:
    """A filter for `set_filter`: these system calls answer EPERM, and those of `commands` with one
    of these numbers for their second argument; those of another architecture kill. Unknown names
    are passed over."""
    lines = [
        (_AT_LEAST, _TO_END, 0, _X32),
        *((_EQUALS, _TO_END, 0, number) for number in _numbers(names)),
    ]
    for name, values in commands.items():
        lines += [
            (_LOAD, 0, 0, _NUMBER_OFFSET),
            (_EQUALS, 0, len(values) + 1, arch().syscalls[name]),
            (_LOAD, 0, 0, _SECOND_OFFSET),
            *((_EQUALS, _TO_END, 0, value) for value in values),
        ]
    return _program(lines, _ALLOW, _REFUSE)


def allowing(names: Iterable[str]) -> bytes:
    """A filter for `set_filter`: system calls but these answer EPERM; those of another architecture
    kill. Unknown names are passed over."""
    return _program([(_EQUALS, _TO_END, 0, number) for number in _numbers(names)], _REFUSE, _ALLOW)


def set_filter(program: bytes) -> None:
    """seccomp(2), from now on."""
    code = buffer(program)
    filter_program = pack("=HxxxxxxQ", len(program) // _INSTRUCTION.size, address(code))
    syscall("seccomp", "our filter", SECCOMP_SET_MODE_FILTER, 0, filter_program)


def _numbers(names: Iterable[str]) -> list[int]:
    known = arch().syscalls
    return sorted({known[name] for name in names if name in known})


def _program(lines: Sequence[tuple[int, int, int, int]], other: int, end: int) -> bytes:
    """Of instructions about the call's number: `other` when they are passed, `end` where one of
    them goes _TO_END."""
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUALS, 1, 0, arch().audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        *lines,
        (_RETURN, 0, 0, other),
        (_RETURN, 0, 0, end),
    ]
    return b"".join(
        _INSTRUCTION.pack(code, len(lines) - place - 2 if true == _TO_END else true, false, value)
        for place, (code, true, false, value) in enumerate(lines)
    )


def _close(fd: int) -> None:
    syscall("close", f"fd {fd}", fd)
