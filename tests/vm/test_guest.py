"""Boots the guest once and runs in it what needs pure cgroup v2, systemd and AppArmor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.guest import Guest

# Folders and files that run in the guest; each is one pytest run there, so that a report names what failed.
INSIDE = ("tests/vm/inside",)


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with Guest() as booted:
        booted.push_project()
        yield booted


@pytest.mark.guest
@pytest.mark.timeout(720)
@pytest.mark.parametrize("what", INSIDE)
def test_in_the_guest(guest: Guest, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"cd /root/project && CI=true PYRUNC_GUEST=1 PYRUNC_LEDGER=machine /opt/venv/bin/python -m pytest -v --tb=short --timeout=300 {what}"
    done = guest.ssh(command, check=False, timeout_s=690)
    report = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
    with capsys.disabled():
        print(
            "\n"
            + "\n".join(
                f"    guest: {line}"
                for line in report.splitlines()
                if "::" in line or "passed" in line or "failed" in line
            )
        )
    assert done.returncode == 0, report[-20000:]
