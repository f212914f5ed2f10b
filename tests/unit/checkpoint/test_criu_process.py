"""Tests the arguments, environment and descriptors that `criu swrk` gets. A script stands for
criu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyrunc.checkpoint.criu import Criu
from pyrunc.errors import NotFound


@pytest.fixture
def status_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script `criu` into PATH; return the file to which it copies its /proc/self/status."""
    status = tmp_path / "status"
    program = tmp_path / "criu"
    program.write_text(f"#!/bin/sh\ncat /proc/self/status > {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return status


def own() -> str:
    return next(
        line
        for line in Path("/proc/thread-self/status").read_text().splitlines()
        if "NoNewPrivs" in line
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_new_privileges_are_given_up_for_criu_alone(status_file: Path, wanted: bool) -> None:
    with Criu({}, no_new_privileges=wanted):
        pass
    assert f"NoNewPrivs:\t{int(wanted)}" in status_file.read_text().splitlines()
    assert own() == "NoNewPrivs:\t0"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_error_names_the_missing_criu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFound, match="criu"):
        Criu({}, no_new_privileges=wanted)
