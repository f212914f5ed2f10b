"""Provides a shim with a pod for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.kernel.shim.pod import TestPod


@pytest_asyncio.fixture
async def pod(tmp_path: Path) -> AsyncIterator[TestPod]:
    async with TestPod(tmp_path / "pod") as test_pod:
        yield test_pod
