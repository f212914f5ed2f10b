"""Tests which system calls the profile RuntimeDefault allows."""

from __future__ import annotations

import errno

import pytest

from pyrunc.abi.arch import arch
from pyrunc.errors import Unsupported
from pyrunc.seccomp import compiler, default
from pyrunc.seccomp.profile import ALLOW, ERRNO, X86
from tests.unit.seccomp.interpreter import run

CALLS = arch("x86_64").syscalls
EPERM, ENOSYS = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
USUAL = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW",
    "CAP_SETGID", "CAP_SETUID",
    "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL",
    "CAP_AUDIT_WRITE",
)  # fmt: skip


def program(*capabilities: str) -> bytes:
    result = compiler.compile(default.runtime_default(capabilities, "x86_64"), "x86_64", store="")
    assert result is not None
    return result.program


def test_no_name_is_listed_twice() -> None:
    names = [name for subject in default.FOR_ALL for name in subject.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name",
    ["read", "write", "openat2", "clone", "execve", "futex_waitv", "ptrace",
    "landlock_create_ruleset", "memfd_create",
     "pidfd_open", "statx", "rseq", "arch_prctl", "chroot", "mknod"],
)  # fmt: skip
def test_calls_of_ordinary_programs_are_allowed(name: str) -> None:
    assert run(program(*USUAL), CALLS[name]) == ALLOW


@pytest.mark.parametrize(
    "name",
    ["mount", "umount2", "unshare", "setns", "keyctl", "add_key", "request_key", "bpf",
    "perf_event_open", "userfaultfd",
     "kexec_load", "init_module", "reboot", "swapon", "io_uring_setup", "io_uring_enter",
     "io_uring_register", "acct",
     "settimeofday", "open_by_handle_at", "pivot_root", "open_tree", "move_mount", "fsopen",
     "quotactl", "iopl",
     "sethostname", "syslog", "vhangup", "kcmp", "mbind", "nfsservctl", "personality"],
)  # fmt: skip
def test_calls_that_reach_beyond_the_container_are_denied(name: str) -> None:
    assert run(program(*USUAL), CALLS[name], [0x40000]) == EPERM


@pytest.mark.requirement("8.8")
@pytest.mark.parametrize("capability", sorted(default.BY_CAPABILITY))
def test_a_capability_opens_its_calls(capability: str) -> None:
    without, having = program(*set(USUAL) - {"CAP_SYS_CHROOT"}), program(capability)
    for name in default.BY_CAPABILITY[capability].split():
        number = CALLS.get(name)
        if number is not None:
            assert run(having, number) == ALLOW
    opened = [
        n
        for n in default.BY_CAPABILITY[capability].split()
        if n in CALLS and run(without, CALLS[n]) != ALLOW
    ]
    assert opened, "the capability changes nothing"


def test_clone_allows_no_new_namespaces_and_clone3_is_denied() -> None:
    compiled = program(*USUAL)
    assert run(compiled, CALLS["clone"], [0x11]) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(compiled, CALLS["clone"], [flag | 0x11]) == EPERM
    assert run(compiled, CALLS["clone3"]) == ENOSYS
    admin = program("CAP_SYS_ADMIN")
    assert (
        run(admin, CALLS["clone3"]) == ALLOW and run(admin, CALLS["clone"], [0x10000000]) == ALLOW
    )


@pytest.mark.parametrize("family", [1, 2, 10, 16, 17, 29, 31, 37, 39, 41, 44, 45])
def test_usual_socket_families_are_allowed(family: int) -> None:
    assert run(program(), CALLS["socket"], [family]) == ALLOW


@pytest.mark.parametrize("family", [38, 40, 40 | 1 << 32, 38 | 1 << 63, 46])
def test_vsock_and_the_kernels_cryptography_are_closed_also_with_a_dirty_register(
    family: int,
) -> None:
    assert run(program(), CALLS["socket"], [family]) == EPERM


def test_the_multiplexer_of_i386_makes_no_sockets() -> None:
    compiled, socketcall = program(*USUAL), 102
    assert run(compiled, socketcall, [1], architecture=X86) == ENOSYS
    assert {run(compiled, socketcall, [call], architecture=X86) for call in range(2, 21)} == {ALLOW}
    assert run(compiled, 359, [2], architecture=X86) == ALLOW
    assert {run(compiled, 359, [family], architecture=X86) for family in (38, 40)} == {EPERM}
    assert run(compiled, socketcall) == ALLOW  # fchdir has this number on x86-64
    assert run(compiled, CALLS["getuid"]) == ALLOW


def test_usual_personalities_are_allowed() -> None:
    compiled = program()
    allowed = [
        value
        for value in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF, 0x40000, 1)
        if run(compiled, CALLS["personality"], [value]) == ALLOW
    ]
    assert allowed == [0, 8, 0x20000, 0x20008, 0xFFFFFFFF]


def test_32_bit_programs_run_under_the_default_profile() -> None:
    assert run(program(), 3, architecture=X86) == ALLOW  # read
    assert run(program(), 21, architecture=X86) == EPERM  # mount


@pytest.mark.requirement("8.8")
def test_arm_has_its_own_calls_and_other_machines_none() -> None:
    profile = default.runtime_default([], "aarch64")
    assert any("cacheflush" in rule["names"] for rule in profile["syscalls"])
    assert compiler.compile(profile, "aarch64", store="") is not None
    with pytest.raises(Unsupported, match="riscv64"):
        default.runtime_default([], "riscv64")
