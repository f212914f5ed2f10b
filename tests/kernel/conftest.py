"""Provides a fresh bundle for each test that needs one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.compile import host as facts
from pyrunc.compile import pause
from pyrunc.program import launch
from tests.kernel.box import Box


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    yield Box(tmp_path)
    # Others may make mounts meanwhile; a leaked mount of the box names its folder.
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), (
        "a mount appeared on the host"
    )


@pytest.fixture(autouse=True, scope="session")
def what_a_process_keeps() -> None:
    """Make the sealed memfds of launcher and pause before the first test."""
    # A process makes them once and keeps them; the ledger would count them as a test's leak.
    launch.executable()
    os.close(pause._open_pause())
    facts.host()
