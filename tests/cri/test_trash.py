"""Tests writable layers of removed containers: invisible at once and deleted soon, even if the
server is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cri_server.store import trash as trashes
from cri_server.store.trash import Trash
from tests.cri.server_harness import Server, server_fixture
from tests.support.processes import wait_until

server = server_fixture("function")


def trash(server: Server) -> list[str]:
    return os.listdir(server.root / "trash")


def test_a_removed_layer_is_deleted(server: Server) -> None:
    container = server.launch(server.run_pod(), server.container_config())
    server.output(container, "sh", "-c", "mkdir -p /a/b/c; touch /a/1 /a/b/2 /a/b/c/3")
    assert (server.root / "containers" / container / "upper/a/b/c/3").exists()
    server.stop_container(container)
    server.remove_container(container)
    assert not (server.root / "containers" / container).exists()
    assert wait_until(lambda: trash(server) == [], 30)
    server.remove_all()


def test_a_killed_servers_leftovers_are_deleted(server: Server) -> None:
    server.kill()
    (server.root / "trash/layer.1/upper/deep").mkdir(parents=True)
    server.start()
    assert wait_until(lambda: trash(server) == [], 30)


def test_a_layer_that_cannot_be_deleted_blocks_no_other(server: Server) -> None:
    """A removed layer with a mount in it stays until the mount is gone; then the next start, or
    `gc`, deletes it."""
    server.kill()
    stuck, other = server.root / "trash/a/mounted", server.root / "trash/b"
    stuck.mkdir(parents=True)
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", stuck], check=True)
    try:
        (stuck / "file").touch()
        server.start()
        assert wait_until(lambda: trash(server) == ["a"], 30)
        assert wait_until(lambda: b"cannot delete" in server.log.read_bytes(), 30)
        container = server.launch(server.run_pod(), server.container_config())
        server.remove_container(container)
        assert wait_until(lambda: trash(server) == ["a"], 30) and (stuck / "file").exists()
        server.remove_all()
    finally:
        subprocess.run(["umount", stuck], check=True)
    server.kill()
    server.start()
    assert wait_until(lambda: trash(server) == [], 30)


def test_gc_deletes_files_that_were_stuck(server: Server) -> None:
    container = server.launch(server.run_pod(), server.container_config())
    stuck = server.root / "containers" / container / "upper/mounted"
    stuck.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", stuck], check=True)
    server.remove_container(container)
    [left] = trash(server)
    assert wait_until(lambda: b"cannot delete" in server.log.read_bytes(), 30)
    subprocess.run(["umount", server.root / "trash" / left / "upper/mounted"], check=True)
    assert f"{server.root}/trash/{left}" in gc(server)
    assert trash(server) == []
    server.remove_all()


def gc(server: Server) -> str:
    command = [sys.executable, "-m", "cri_server.cli.main", "-r", f"unix://{server.socket}", "gc"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def layers(folder: Path, count: int) -> list[Path]:
    folders = [folder / str(number) for number in range(count)]
    for path in folders:
        (path / "upper").mkdir(parents=True)
    return folders


def test_the_number_of_waiting_layers_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trashes, "MOST_WAITING", 2)
    (tmp_path / "trash").mkdir()
    trash = Trash(tmp_path / "trash")
    for path in layers(tmp_path, 3):
        trash.take(path)
        assert not path.exists()
        trash.take(path)  # a missing layer is no error
    assert len(os.listdir(tmp_path / "trash")) == 2


def test_the_trash_may_be_on_another_file_system(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "trash"], check=True)
    try:
        [layer] = layers(tmp_path, 1)
        Trash(tmp_path / "trash").take(layer)
        assert not layer.exists() and os.listdir(tmp_path / "trash") == []
    finally:
        subprocess.run(["umount", tmp_path / "trash"], check=True)


async def test_layers_can_be_added_while_the_trash_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    trash = Trash(tmp_path / "trash")
    for path in layers(tmp_path, 40):
        trash.take(path)
        trash.empty_soon()
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        while os.listdir(tmp_path / "trash"):
            trash.empty_soon()
            await asyncio.sleep(0.01)
    await trash.close()
