"""Provides a keeper with its own folder for each test, and ends it afterwards."""

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
