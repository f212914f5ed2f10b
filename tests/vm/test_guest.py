"""Boots the guest once and runs in it what needs pure cgroup v2, systemd and AppArmor."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.guest import Guest

# Folders and files that run in the guest; each is one pytest run there, so that a report names what failed. The plan's tests
# run there because the guest's kernel is older than 6.15: no layers by descriptor, no clones of detached mounts.
PLAN = ("container", "holder", "old_kernels", "user_namespace", "mounts", "exec", "identity")
INSIDE = ("tests/vm/inside", " ".join(f"tests/kernel/plan/test_{name}.py" for name in PLAN))


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with Guest() as booted:
        booted.push_project()
        yield booted


@pytest.mark.guest
@pytest.mark.timeout(840)
@pytest.mark.parametrize("what", INSIDE, ids=("limits", "plan"))
def test_in_the_guest(guest: Guest, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"cd /root/project && CI=true PYRUNC_GUEST=1 PYRUNC_LEDGER=machine /opt/venv/bin/python -m pytest -v --tb=short --timeout=300 {what}"
    try:
        done = guest.ssh(command, check=False, timeout_s=810)
        output, outcome = done.stdout + done.stderr, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        output, outcome = late.stdout or b"", f"no end after {late.timeout:.0f} s"
    report = output.decode(errors="replace")
    with capsys.disabled():
        ran = [line for line in report.splitlines() if "::" in line or " passed" in line or " failed" in line]
        print("", *(f"    guest ({guest.accelerator}): {line}" for line in ran), sep="\n")
    assert outcome == "exit code 0", f"{outcome}\n{report[-20000:]}\nits console:\n{guest.program.tail(40)}"
