"""Provides a throwaway host, a network namespace, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.cni.harness import Host, new_host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with new_host(str(tmp_path)) as throwaway:
        yield throwaway
