"""Compiles a profile to a filter of BPF instructions. Each profile is compiled once: the filter is
stored in memory and on disk, under the hash of profile and machine.

libseccomp takes some milliseconds to compile a profile. Loading a stored filter takes less than a
tenth of a millisecond, and needs no libseccomp. The store is a folder that only its owner can write
to, because its filters decide about every system call.
"""

from __future__ import annotations

import marshal
import os
import stat
from _blake2 import blake2b  # hashlib would load OpenSSL

from pyrunc.atomic_file import write_bytes
from pyrunc.errors import Unsupported
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.fd import closing_fd
from pyrunc.seccomp import profile as profiles
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pyrunc.seccomp.profile import SeccompProfile, SeccompRule

# A part of the key of each stored filter: increment it when this file, `stub` or `flatten` changes.
GENERATION = b"2"
INSTRUCTION_SIZE_BYTES, MAX_INSTRUCTIONS = 8, 4096
STORE_LIMIT_FILES = 128


class SeccompFilter(Value):
    """A filter to load.

    - `program`: its BPF instructions, for sock_fprog
    - `flags`: for seccomp(2); NEW_LISTENER if `notifies`
    - `notifies`: a listener in user space answers some calls
    """

    program: bytes
    flags: int
    notifies: bool


_filters: dict[bytes, SeccompFilter | None] = {}


def compile(
    seccomp: Mapping[str, Any], arch: str = "", store: str | None = None
) -> SeccompFilter | None:
    """Return the filter of an OCI `linux.seccomp` object. None when it would allow every call.

    - `arch`: the machine (uname -m); empty for this one
    - `store`: the folder for filters; None for `default_store()`, "" for none

    Raises KernelError; InvalidSpec for a wrong object; Unsupported without libseccomp, for a flag
    that the kernel does not know, for an unknown machine and for a filter of more than
    MAX_INSTRUCTIONS.
    """
    machine = arch or os.uname().machine
    # By content, not by path: kubelet's pods share few profiles, and a profile that is edited is
    # another one.
    key = _key(seccomp, machine)
    if key not in _filters:
        _filters[key] = _load_or_build(
            seccomp, machine, key, default_store() if store is None else store
        )
    return _filters[key]


def default_store() -> str:
    """Return the folder for compiled filters: for root `/run/pyrunc/.seccomp`, for other users a
    folder beneath $XDG_RUNTIME_DIR, or "" (no store) if this variable is not set."""
    if is_machine_root():
        return "/run/pyrunc/.seccomp"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/pyrunc/.seccomp" if runtime else ""


def _key(seccomp: Mapping[str, Any], machine: str) -> bytes:
    # Version 2 has no references, so equal objects give equal bytes.
    text = marshal.dumps(dict(seccomp), 2)
    return blake2b(GENERATION + machine.encode() + b"\0" + text, digest_size=20).digest()


def _load_or_build(
    seccomp: Mapping[str, Any], machine: str, key: bytes, store: str
) -> SeccompFilter | None:
    profile = profiles.parse(seccomp)
    if profile is None:
        return None
    program = _load(store, key)
    if program is None:
        program = build(profile, machine)
        _save(store, key, program)
    return SeccompFilter(program, _flags(profile), profile.notifies)


def build(profile: SeccompProfile, machine: str) -> bytes:
    """Compile a profile for `machine` (uname -m) to a filter. Raises Unsupported for a machine that
    `profiles.NATIVE` lacks.

    The filter has the rules for i386's socketcall(2), then the stub that answers ENOSYS to calls
    newer than the profile, then libseccomp's filter for all other rules. The binary search of
    `flatten.flatten` replaces the stub and libseccomp's filter if the search is shorter.
    """
    from pyrunc.seccomp import stub
    from pyrunc.seccomp.flatten import flatten

    if machine not in profiles.NATIVE:
        raise Unsupported(
            f"seccomp on {machine}: only {' and '.join(profiles.NATIVE)} are supported"
        )
    native = profiles.NATIVE[machine]
    architectures = [
        native,
        *(audit for audit in dict.fromkeys(profile.architectures) if audit != native),
    ]
    socket_rules = _multiplexed(profile.rules)
    rules = [rule for rule in profile.rules if rule not in socket_rules]
    conditional = {rule.name for rule in rules if rule.conditions}
    prologue = stub.prologue(
        _highest(profile, architectures), _verdicts(profile), stub.is_needed(profile.default_action)
    )
    whole = prologue + _compile_rules(profile.default_action, rules, architectures, machine)
    judged_by_arguments = [rule for rule in rules if rule.name in conditional]
    rest = _compile_rules(profile.default_action, judged_by_arguments, architectures, machine)
    verdicts = {rule.conditions[0][2]: rule.action for rule in reversed(socket_rules)}
    first = stub.multiplexed(verdicts if profiles.X86 in architectures else {})
    program = first + min(whole, flatten(whole, rest, architectures), key=len)
    if len(program) > MAX_INSTRUCTIONS * INSTRUCTION_SIZE_BYTES:
        raise Unsupported(f"the seccomp profile needs more than {MAX_INSTRUCTIONS} instructions")
    return program


def _multiplexed(rules: Sequence[SeccompRule]) -> list[SeccompRule]:
    """Return the rules for i386's socketcall(2) with a single condition: that the first argument,
    the number of a socket call, equals a value. libseccomp does not apply these rules correctly;
    `stub.multiplexed` does."""
    first = (0, profiles.OPERATORS["SCMP_CMP_EQ"])
    return [
        r
        for r in rules
        if r.name == "socketcall" and len(r.conditions) == 1 and r.conditions[0][:2] == first
    ]


def _compile_rules(
    default_action: int, rules: Sequence[SeccompRule], architectures: Sequence[int], machine: str
) -> bytes:
    """Compile `rules` with libseccomp; return the filter."""
    from pyrunc.kernel import seccomp as library

    with library.Compiler(default_action) as compiler:
        for audit in architectures:
            compiler.add_architecture(audit)
        if machine != os.uname().machine:
            # libseccomp adds the architecture of this machine by itself; a filter for another
            # machine must not have it.
            compiler.remove_architecture(profiles.NATIVE[os.uname().machine])
        for rule in rules:
            number = library.number(rule.name)
            # A name that libseccomp does not know is passed over, as in runc: profiles list calls
            # of all architectures and of newer kernels.
            if number != library.UNKNOWN_SYSCALL:
                compiler.add_rule(rule.action, number, rule.conditions, rule.name)
        return compiler.program()


def _verdicts(profile: SeccompProfile) -> dict[int, int]:
    """Return the actions of the unconditional rules for calls whose name libseccomp does not know:
    call number -> action."""
    from pyrunc.abi.syscalls_recent import RECENT
    from pyrunc.kernel import seccomp as library

    actions: dict[int, int] = {}
    for rule in profile.rules:
        new = rule.name in RECENT and not rule.conditions
        if new and library.number(rule.name) == library.UNKNOWN_SYSCALL:
            actions.setdefault(RECENT[rule.name], rule.action)
    return actions


def _highest(profile: SeccompProfile, architectures: Sequence[int]) -> dict[int, int]:
    """Return a dict: architecture -> highest number of the calls that the profile names."""
    from pyrunc.kernel import seccomp as library

    return {
        audit: max([0, *(library.number_on(audit, name) for name in profile.names)])
        for audit in architectures
    }


def _flags(profile: SeccompProfile) -> int:
    """Return the flags of seccomp(2). TSYNC is dropped: the loading process has one thread."""
    from pyrunc.kernel import seccomp as library

    if profile.flags is None:
        # As runc does without flags: before Linux 5.16 a filter without SPEC_ALLOW turns on the
        # mitigation of speculative store bypass, which slows its process.
        flags = profiles.SPEC_ALLOW if library.knows_flag(profiles.SPEC_ALLOW) else 0
    else:
        flags = profile.flags & ~profiles.TSYNC
        for name, flag in profiles.FLAGS.items():
            if flags & flag and not library.knows_flag(flag):
                raise Unsupported(f"this kernel does not support the seccomp flag {name}")
    if not profile.notifies:
        # The kernel takes this flag only with a listener (EINVAL).
        return flags & ~profiles.WAIT_KILLABLE_RECV
    return flags | profiles.NEW_LISTENER


def _load(store: str, key: bytes) -> bytes | None:
    """Return the stored filter; None when there is none or other users may write to the folder."""
    if not store or not _is_ours_alone(store):
        return None
    try:
        descriptor = os.open(f"{store}/{key.hex()}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with closing_fd(descriptor):
        program = os.read(descriptor, MAX_INSTRUCTIONS * INSTRUCTION_SIZE_BYTES + 1)
    fits = (
        0 < len(program) <= MAX_INSTRUCTIONS * INSTRUCTION_SIZE_BYTES
        and len(program) % INSTRUCTION_SIZE_BYTES == 0
    )
    return program if fits else None


def _save(store: str, key: bytes, program: bytes) -> None:
    """Store a filter for later processes. A store that cannot be written is no error, because it
    only costs time."""
    if not store:
        return
    try:
        os.makedirs(store, 0o700, exist_ok=True)
        if _is_ours_alone(store):
            # Names are hashes, so this order is as good as a random one, and needs no stat(2) of
            # each file.
            for name in sorted(os.listdir(store))[STORE_LIMIT_FILES - 1 :]:
                os.unlink(f"{store}/{name}")
            write_bytes(f"{store}/{key.hex()}", program)
    except OSError:
        pass


def _is_ours_alone(folder: str) -> bool:
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )
