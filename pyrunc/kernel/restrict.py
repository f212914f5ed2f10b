"""Restricts the calling thread for good: its capabilities, its access to files (landlock), and its
system calls (a seccomp filter).

Not for containers, but for pyrunc's single-threaded helpers that read hostile bytes. A filter built
here answers EPERM, either to a list of system calls or to all calls that are not in a list.
Sources: capset(2), landlock(7), seccomp(2).
"""

from __future__ import annotations

import errno
from struct import Struct, pack

from pyrunc.abi.arch import arch
from pyrunc.abi.capability import CAPABILITIES, LINUX_CAPABILITY_VERSION_3
from pyrunc.abi.prctl import PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER
from pyrunc.kernel.call import address, buffer, raw, syscall
from pyrunc.kernel.fd import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_VERSION_QUERY, _RULE_PATH_BENEATH = 1, 1
# The file system rights that each ABI version of landlock knows: ABI 1 has 13, 2 adds REFER, 3
# TRUNCATE, 5 IOCTL_DEV.
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
# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_LOAD, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32 = 0x40000000  # x86-64's second numbering of the same calls
# Offsets in struct seccomp_data. The third is the low half of the second argument; it holds an
# argument of type int, because both supported architectures are little-endian.
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _SECOND_OFFSET = 0, 4, 24
_TO_END = -1
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


def no_new_privileges() -> None:
    """Set no_new_privs: no later execve gains privileges. An unprivileged process must do this
    before it loads a seccomp filter or uses landlock."""
    syscall("prctl", "PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def keep_capabilities(names: Iterable[str]) -> None:
    """Drop all permitted and effective capabilities but `names`, and clear the inheritable ones
    (capset(2)). Capabilities that the process does not have are ignored."""
    header = pack("=Ii", LINUX_CAPABILITY_VERSION_3, 0)
    now = buffer(24)
    syscall("capget", "our capabilities", header, now)
    mask = sum(1 << CAPABILITIES[name] for name in names)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    permitted = [int.from_bytes(now[at : at + 4], "little") for at in (4, 16)]
    # capset(2) fails with EPERM as a whole for one capability that the process does not hold.
    low, high = low & permitted[0], high & permitted[1]
    syscall("capset", "our capabilities", header, pack("=6I", low, low, 0, high, high, 0))


def only_beneath(folder_fds: Iterable[int]) -> bool:
    """Restrict the process by landlock(7), as far as the kernel supports it; False if the kernel
    has no landlock.

    The process can then open, make and remove files only beneath the directories `folder_fds`. It
    cannot bind or connect TCP sockets. Its signals and abstract sockets reach only its descendants.
    Open descriptors keep working.
    """
    version = raw("landlock_create_ruleset", None, 0, _VERSION_QUERY)
    if version < 0:
        return False
    rights = _FILE_RIGHTS[min(version, _NEWEST_FILE_RIGHTS)]
    attributes = pack("=3Q", rights, _BIND_AND_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    # The attributes grew with ABI 4 (network) and ABI 6 (scopes), and an older kernel refuses a
    # longer struct (E2BIG).
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    with closing_fd(syscall("landlock_create_ruleset", "", attributes, size, 0)) as ruleset:
        # Rules hold descriptors, not paths: a folder that is renamed later keeps its rule
        # (landlock(7)).
        for fd in folder_fds:
            rule = pack("=Qi", rights, fd)
            syscall("landlock_add_rule", f"fd {fd}", ruleset, _RULE_PATH_BENEATH, rule, 0)
        syscall("landlock_restrict_self", "", ruleset, 0)
    return True


def refusing(names: Iterable[str], commands: Mapping[str, Sequence[int]]) -> bytes:
    """Build a filter for `set_filter` that answers EPERM to the calls below and allows all others.
    A call of another architecture kills the process.

    - calls in `names`; a name that this architecture lacks is ignored
    - x32 calls
    - calls in `commands` (name -> numbers) whose second argument is one of the numbers
    """
    lines = [
        # An x32 call has x86-64's architecture in seccomp_data but another number, so a list of
        # refused numbers would let it pass (seccomp(2), "Filters").
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
    """Build a filter for `set_filter` that answers EPERM to all system calls but `names`. A call of
    another architecture kills the process. Names that this architecture lacks are ignored."""
    return _program([(_EQUALS, _TO_END, 0, number) for number in _numbers(names)], _REFUSE, _ALLOW)


def set_filter(program: bytes) -> None:
    """Load the filter for the calling thread (seccomp(2))."""
    code = buffer(program)
    filter_program = pack("=HxxxxxxQ", len(program) // _INSTRUCTION.size, address(code))
    syscall("seccomp", "our filter", SECCOMP_SET_MODE_FILTER, 0, filter_program)


def _numbers(names: Iterable[str]) -> list[int]:
    numbers = arch().syscalls
    return sorted({numbers[name] for name in names if name in numbers})


def _program(lines: Sequence[tuple[int, int, int, int]], other: int, end: int) -> bytes:
    """Return a filter that checks the architecture and then runs the instructions `lines`, which
    test the number of a system call. The filter returns `end` if an instruction jumps to _TO_END,
    else `other`."""
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
