"""Tests filters in the kernel: every action, comparison, flag and architecture, seen from the
filtered program."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.box import Box

SIGSYS = 31
# Asks for its pid by the 32-bit entry, and by the number that x32 has for it.
FOREIGN = """
#include <unistd.h>
int main(int n, char **words) {
    long answer;
    if (n > 1 && words[1][0] == 'i')
        __asm__ volatile("int $0x80" : "=a"(answer) : "a"(20L) : "memory");
    else answer = syscall(0x40000000 + 39);
    return answer < 0 ? 5 : answer == getpid() ? 0 : 6;
}
"""
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="entries of x86")


def filtered(box: Box, *rules: dict[str, Any], **more: Any) -> Box:
    box.linux["seccomp"] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": list(rules), **more}
    return box


def rule(action: str, *names: str, **more: Any) -> dict[str, Any]:
    return {"names": [*names], "action": action, **more}


@pytest.mark.parametrize("no_new_privileges", [False, True])
@pytest.mark.parametrize(
    ("action", "more", "code", "words"),
    [
        ("SCMP_ACT_ERRNO", {}, 1, "Operation not permitted"),
        ("SCMP_ACT_ERRNO", {"errnoRet": 28}, 1, "No space left on device"),
        ("SCMP_ACT_ERRNO", {"errnoRet": 0}, 0, ""),
        ("SCMP_ACT_TRACE", {}, 1, "Function not implemented"),
        ("SCMP_ACT_KILL", {}, 128 + SIGSYS, ""),
        ("SCMP_ACT_KILL_THREAD", {}, 128 + SIGSYS, ""),
        ("SCMP_ACT_KILL_PROCESS", {}, 128 + SIGSYS, ""),
        ("SCMP_ACT_TRAP", {}, 128 + SIGSYS, ""),
        ("SCMP_ACT_LOG", {}, 0, ""),
        ("SCMP_ACT_ALLOW", {}, 0, ""),
    ],
)
def test_actions_have_their_effect(
    box: Box, action: str, more: dict[str, Any], code: int, words: str, no_new_privileges: bool
) -> None:
    box.process["noNewPrivileges"] = no_new_privileges
    filtered(box, rule(action, "mkdir", "mkdirat", **more))
    exit_code, text = box.outcome("mkdir", "/made")
    assert exit_code == code and words in text, text
    was_made = (box.upper / "made").is_dir()
    assert was_made == (action in ("SCMP_ACT_LOG", "SCMP_ACT_ALLOW"))


def test_a_default_action_may_refuse_calls(box: Box) -> None:
    box.process["noNewPrivileges"] = True
    box.linux["seccomp"] = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 28,
        "syscalls": [rule("SCMP_ACT_ALLOW", *ENOUGH)],
    }
    code, text = box.outcome("sh", "-c", "mkdir /x")
    assert (code, "No space left" in text) == (1, True), text


# What a shell of busybox needs.
ENOUGH = [
    *("access", "arch_prctl", "brk", "clone", "clone3", "close", "close_range", "dup2", "dup3",
    "execve", "exit", "exit_group", "fcntl"),
    *("fork", "fstat", "futex", "getcwd", "getegid", "geteuid", "getgid", "getpgrp", "getpid",
    "getppid", "getrandom", "getuid", "ioctl"),
    *("lseek", "lstat", "madvise", "mmap", "mprotect", "mremap", "munmap", "newfstatat", "open",
    "openat", "pipe", "pipe2", "poll", "prctl"),
    *("pread64", "prlimit64", "read", "readlink", "readlinkat", "rseq", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend"),
    *("set_robust_list", "set_tid_address", "setgid", "setuid", "sigaltstack", "stat", "statx",
    "sysinfo", "umask", "uname", "vfork"),
    *("wait4", "write", "writev"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "value", "two", "refused"),
    [
        ("SCMP_CMP_EQ", 5, 0, [5]),
        ("SCMP_CMP_NE", 5, 0, [4, 6]),
        ("SCMP_CMP_LT", 5, 0, [4]),
        ("SCMP_CMP_LE", 5, 0, [4, 5]),
        ("SCMP_CMP_GT", 5, 0, [6]),
        ("SCMP_CMP_GE", 5, 0, [5, 6]),
        ("SCMP_CMP_MASKED_EQ", 6, 4, [4, 5]),
    ],
)
def test_comparisons_of_arguments_decide(
    box: Box, op: str, value: int, two: int, refused: list[int]
) -> None:
    """chmod(path, mode) is refused for exactly those modes that match the filter's comparison."""
    args = {"op": op, "value": value, "valueTwo": two}
    filtered(
        box,
        rule("SCMP_ACT_ERRNO", "chmod", args=[{"index": 1, **args}]),
        # the call on architectures without chmod
        rule("SCMP_ACT_ERRNO", "fchmodat", args=[{"index": 2, **args}]),
    )
    script = "for n in 4 5 6; do chmod $n /etc/passwd 2>/dev/null || echo $n; done"
    assert [int(n) for n in box.run(script).split()] == refused


@pytest.mark.parametrize(
    "flags",
    [
        None,
        [],
        ["SECCOMP_FILTER_FLAG_LOG"],
        ["SECCOMP_FILTER_FLAG_SPEC_ALLOW"],
        ["SECCOMP_FILTER_FLAG_TSYNC"],
        ["SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW", "SECCOMP_FILTER_FLAG_TSYNC"],
    ],
)
def test_filters_are_loaded_with_their_flags(box: Box, flags: list[str] | None) -> None:
    filtered(
        box,
        rule("SCMP_ACT_ERRNO", "mkdir", "mkdirat"),
        **({} if flags is None else {"flags": flags}),
    )
    status = box.run("cat /proc/self/status; mkdir /x 2>/dev/null && echo made; true")
    assert "Seccomp:\t2" in status and "Seccomp_filters:\t1" in status and "made" not in status


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.c").write_text(FOREIGN)
    subprocess.run(
        ["cc", "-static", "-O1", "-o", str(folder / "foreign"), str(folder / "foreign.c")],
        check=True,
    )
    return folder / "foreign"


@x86_only
@pytest.mark.parametrize(
    ("architectures", "entry", "code"),
    [
        (["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"], "i386", 0),
        (["SCMP_ARCH_X86"], "i386", 0),
        (["SCMP_ARCH_X86_64"], "i386", 128 + SIGSYS),
        ([], "i386", 128 + SIGSYS),
        (["SCMP_ARCH_X86_64"], "x32", 128 + SIGSYS),
        # let through, and this kernel has no x32
        (["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"], "x32", 5),
    ],
)
def test_filters_cover_their_architectures(
    box: Box, foreign: Path, architectures: list[str], entry: str, code: int
) -> None:
    box.bind(foreign, "/foreign", "bind", "ro")
    filtered(box, rule("SCMP_ACT_ERRNO", "mkdir", "mkdirat"), architectures=architectures)
    assert box.outcome("/foreign", entry)[0] == code


@x86_only
def test_a_rule_holds_for_every_listed_architecture(box: Box, foreign: Path) -> None:
    box.bind(foreign, "/foreign", "bind", "ro")
    architectures = ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]
    filtered(box, rule("SCMP_ACT_ERRNO", "getpid", errnoRet=28), architectures=architectures)
    assert box.outcome("/foreign", "i386")[0] == 5


def test_an_exec_is_filtered_too(box: Box) -> None:
    filtered(box, rule("SCMP_ACT_ERRNO", "mkdir", "mkdirat"))
    with box.running() as (created, request):
        text = box.execute(created, request, "mkdir /x 2>&1; cat /proc/self/status")
        assert "not permitted" in text and "Seccomp_filters:\t1" in text
