"""Tests records of sandboxes: the last save wins, and a removed record does not come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cri_server.store import disk
from cri_server.store.paths import Paths
from cri_server.store.trash import Trash
from pyrunc.atomic_file import read_json
from pyrunc.errors import NotFound
from tests.unit.store.test_store import sandbox


def test_the_last_of_many_saves_stays(tmp_path: Path) -> None:
    paths, one = Paths(tmp_path / "root", tmp_path / "state"), sandbox()

    async def save(number: int) -> None:
        one.netns_path = str(number) * (20_000 if number % 2 else 1)
        await disk.save_sandbox(paths, one)

    async def all_at_once() -> None:
        await asyncio.gather(*(save(number) for number in range(60)))

    paths.prepare()
    asyncio.run(all_at_once())
    assert read_json(str(paths.sandbox_record(one.id)))["netns_path"] == one.netns_path
    assert [path.name for path in paths.sandbox_records.iterdir()] == [f"{one.id}.json"]


def test_a_save_that_is_under_way_does_not_bring_back_a_removed_record(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "root", tmp_path / "state")
    paths.prepare()

    async def race() -> None:
        trash = Trash(paths.trash)
        for number in range(50):
            one = sandbox(f"{number:064x}")
            saving = asyncio.ensure_future(disk.save_sandbox(paths, one))
            await asyncio.sleep(0)
            await disk.remove_sandbox(paths, trash, one)
            await saving
            with pytest.raises(NotFound):
                await disk.save_sandbox(paths, one)

        assert await trash.wait_deleted(30) == []

    asyncio.run(race())
    assert not list(paths.sandbox_records.iterdir())
