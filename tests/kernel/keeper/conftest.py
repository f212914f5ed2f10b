"""A keeper with its own folder, which is ended with its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.keeper.client import Keeper, ensure
from tests.support.keeper import end_keeper


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = ensure(tmp_path)
    yield keeper
    keeper.close()
    end_keeper(tmp_path)
