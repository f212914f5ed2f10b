"""Runs pytest in the guest, and reports test by test on the host."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.guest import Guest


def run(
    guest: Guest,
    arguments: str,
    capsys: pytest.CaptureFixture[str],
    *,
    ledger: str = "",
    timeout_s: float = 2340,
) -> None:
    """Run pytest with `arguments` in the guest's copy of the project; print the outcome of each
    test, and fail if one failed."""
    environment = f"CI=true PYRUNC_GUEST=1 PYRUNC_LEDGER={ledger}"
    command = (
        f"cd /root/project && {environment} /opt/venv/bin/python -m pytest -v --tb=short"
        f" --timeout=900 {arguments}"
    )
    try:
        done = guest.ssh(command, check=False, timeout_s=timeout_s)
        output, outcome = done.stdout + done.stderr, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        output, outcome = late.stdout or b"", f"no end after {late.timeout:.0f} s"
    report = output.decode(errors="replace")
    with capsys.disabled():
        ran = [
            line
            for line in report.splitlines()
            if "::" in line or " passed" in line or " failed" in line
        ]
        print("", *(f"    guest ({guest.accelerator}): {line}" for line in ran), sep="\n")
    assert outcome == "exit code 0", (
        f"{outcome}\n{report[-20000:]}\nits console:\n{guest.program.tail(40)}"
    )
