"""A fresh bundle for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.plan.box import Box


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    mounts_before = Path("/proc/self/mountinfo").read_text()
    yield Box(tmp_path)
    assert Path("/proc/self/mountinfo").read_text() == mounts_before, "a mount appeared on the host"
