"""A fresh bundle for each test that needs one."""

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
    # Others may be mounting things of theirs meanwhile; what the box leaves would name its folder.
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), (
        "a mount appeared on the host"
    )


@pytest.fixture(autouse=True, scope="session")
def what_a_process_keeps() -> None:
    """Make the sealed programs, which a process makes once and keeps open, so that they are no
    leak of the first test."""
    launch.executable()
    os.close(pause._open_pause())
    facts.host()
