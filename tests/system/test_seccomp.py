"""Tests calls that a seccomp profile refuses, and the point at which it is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.harness import Runtime


def profile(*rules: dict[str, Any], default: str = "SCMP_ACT_ALLOW", **more: Any) -> dict[str, Any]:
    return {"defaultAction": default, "syscalls": [*rules], **more}


def test_a_filtered_call_gives_the_chosen_errno(runtime: Runtime) -> None:
    seccomp = profile(
        {"names": ["chmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28}
    )
    result = runtime.run("sh", "-c", "chmod 600 /tmp", seccomp=seccomp)
    assert "No space left on device" in result.err, result


@pytest.mark.parametrize("nnp", [True, False])
def test_the_filter_is_there_with_and_without_new_privileges(runtime: Runtime, nnp: bool) -> None:
    seccomp = profile({"names": ["swapon"], "action": "SCMP_ACT_ERRNO"})
    change = lambda c: c["process"].update(noNewPrivileges=nnp)  # noqa: E731
    assert (
        "Seccomp:\t2"
        in runtime.run("cat", "/proc/self/status", change=change, seccomp=seccomp).ok().out
    )


def test_a_filter_can_kill_the_process(runtime: Runtime) -> None:
    seccomp = profile({"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_KILL_PROCESS"})
    assert runtime.run("sh", "-c", "mkdir /tmp/x; exit 3", seccomp=seccomp).code == 3
    assert runtime.run("mkdir", "/tmp/x", seccomp=seccomp).code == 128 + 31


def test_the_filter_applies_to_exec(runtime: Runtime) -> None:
    box = runtime.box(
        "sleep", "60", seccomp=profile({"names": ["swapon"], "action": "SCMP_ACT_ERRNO"})
    ).up()
    assert "Seccomp:\t2" in box.exec("cat", "/proc/self/status").ok().out


def test_a_profile_older_than_our_own_calls_still_works(runtime: Runtime) -> None:
    """A container starts although its profile allows only the calls that every program needs."""
    if not runtime.is_pyrunc:
        pytest.skip("a Go program needs more calls behind its filter")
    # The runtime must make no others once the filter is loaded.
    names = (
        "read write close execve exit exit_group brk mmap munmap mprotect arch_prctl "
        "set_tid_address uname ioctl "
    )
    names += (
        "getuid geteuid getgid getegid rt_sigaction rt_sigprocmask readlink fstat "
        "newfstatat stat getrandom prlimit64 "
    )
    names += (
        "set_robust_list rseq fcntl getpid getppid dup2 accept4 dup3 setgid setuid "
        "setgroups capset prctl chdir getcwd "
    )
    seccomp = profile(
        {"names": names.split(), "action": "SCMP_ACT_ALLOW"}, default="SCMP_ACT_ERRNO", flags=[]
    )
    seccomp["syscalls"].append({"names": ["openat2"], "action": "SCMP_ACT_ALLOW"})
    assert runtime.run("sh", "-c", "exit 6", seccomp=seccomp).code == 6
    box = runtime.box("sh", "-c", "echo up", seccomp=seccomp)
    box.create().ok()
    box.start().ok()
    box.gone()
