"""Tests that a running pull loses no content when the store's unused content is discarded."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from cri_server.images.service import ImageService
from tests.cri.images.test_pull import make
from tests.support.registry import Registry, wait_for


async def test_a_running_pull_loses_no_content(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = make(size=500_000)
    registry.push("app:v1", built)
    registry.fault("/blobs/", stall_at=100_000)
    pull = asyncio.create_task(service.pull(f"{registry.host}/app:v1"))
    assert await asyncio.to_thread(wait_for, lambda: _arrived(tmp_path))
    entries = await service.unused()
    assert "download" in {entry.kind for entry in entries}
    assert [await service.discard(entry) for entry in entries] == [False] * len(entries)
    pull.cancel()
    await asyncio.wait([pull], timeout=60)
    registry.faults.clear()
    assert await service.unused() == []
    assert await service.pull(f"{registry.host}/app:v1") == built.id
    assert await service.unused() == []
    for entry in entries:  # by now some are the image's
        await service.discard(entry)
    assert all(folder.is_dir() for folder in (await service.rootfs(built.id)).lower_dirs)
    assert [image.id for image in await service.list()] == [built.id]


def _arrived(root: Path) -> bool:
    """Return whether more than 90 kB of a layer's blob have arrived."""
    for path in root.glob("**/ingest/blob-*"):
        with contextlib.suppress(FileNotFoundError):  # the configuration, by now complete
            if os.stat(path).st_size >= 90_000:
                return True
    return False
