"""Runs runtime-tools' validation, each program as a test. The programs run two at a time; they need
Go and the module proxy once."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest

from tests.support import bundle, groups
from tests.system import runtime_tools

PROGRAMS = (
    "config_updates_without_affect", "create", "default", "delete", "hooks", "hooks_stdin",
    "hostname", "kill",
    "kill_no_effect", "killsig", "linux_devices", "linux_masked_paths", "linux_ns_itype",
    "linux_ns_nopath",
    "linux_ns_path", "linux_ns_path_type", "linux_readonly_paths", "linux_rootfs_propagation",
    "linux_seccomp",
    "linux_sysctl", "linux_uid_mappings", "misc_props", "mounts", "poststart", "poststart_fail",
    "poststop",
    "poststop_fail", "prestart", "prestart_fail", "process", "process_capabilities_fail",
    "process_oom_score_adj",
    "process_rlimits", "process_rlimits_fail", "process_user", "root_readonly_true", "start",
    "state",
)  # fmt: skip
# killsig sends its signal as soon as the shell runs, which sets its trap only later: a race in that
# program. A shell that has set its trap shows a handler besides the one for SIGCHLD that busybox's
# always has.
START = """#!/bin/sh
if [ "$1" = kill ]; then
    sleep 0.5
    pid=$({runtime} state "$2" 2>/dev/null | sed -n 's/.*"pid": *\\([0-9]*\\).*/\\1/p')
    i=0
    while [ $i -lt 300 ] && grep -qs trap "/proc/$pid/cmdline" &&
            grep -Eqs '^SigCgt:.0*(10000)?$' "/proc/$pid/status"; do
        sleep 0.1
        i=$((i+1))
    done
fi
exec {runtime} "$@"
"""
# Building the programs takes a minute, once per cache; running them half of that.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def programs() -> Path:
    return runtime_tools.build()


@pytest.fixture(scope="module")
def answers(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Run the validation programs; return a dict: program -> (exit code, output)."""
    if "PYRUNC_RUNTIME" in os.environ:
        pytest.skip("the list of known failures is ours")
    folder = tmp_path_factory.mktemp("runtime-tools")
    start = folder / "runtime"
    start.write_text(START.format(runtime=f"{' '.join(bundle.runtime())} --root $TMPDIR/state"))
    start.chmod(0o755)

    def answer(name: str, group: Path) -> tuple[int, str]:
        try:
            return runtime_tools.run(programs, name, start, folder / name, group)
        except subprocess.TimeoutExpired as error:
            return -1, f"no end within {error.timeout} s: {error.output!r}"

    with groups.own_group("validation") as group, ThreadPoolExecutor(2) as two:
        results = two.map(answer, PROGRAMS, repeat(group / "own"))
        return dict(zip(PROGRAMS, results, strict=True))


def test_every_program_of_runtime_tools_is_listed(programs: Path) -> None:
    assert tuple(runtime_tools.names(programs)) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_runtime_tools_passes(answers: dict[str, tuple[int, str]], name: str) -> None:
    code, output = answers[name]
    assert not (wrong := runtime_tools.verdict(name, code, output)), f"{wrong}\n{output[-6000:]}"
