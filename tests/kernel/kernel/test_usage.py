"""Tests the disk usage of a hostile tree: links, hard links, depth, and folders that become links
during the count."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from pyrunc.kernel.usage import BLOCK_BYTES, usage
from tests.kernel.kernel.test_tree import DEPTH, make_deep


def test_usage_equals_the_result_of_du(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "a/b").mkdir(parents=True)
    (top / "a/file").write_bytes(b"x" * 100_000)
    os.link(top / "a/file", top / "a/b/again")
    os.link(top / "a/file", top / "third")
    (top / "sparse").touch()
    os.truncate(top / "sparse", 1 << 30)
    (top / "link").symlink_to("/")
    os.mkfifo(top / "pipe")
    du = subprocess.run(
        ["du", "-s", "--block-size=1", top], capture_output=True, text=True, check=True
    )
    assert usage(top) == (int(du.stdout.split()[0]) - top.stat().st_blocks * BLOCK_BYTES, 6)
    assert usage(top / "none") == (0, 0) == usage(top / "link")


def test_folders_too_deep_for_a_path_are_counted(tmp_path: Path) -> None:
    make_deep(tmp_path / "top", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert usage(tmp_path / "top")[1] == 2 * DEPTH
    assert len(os.listdir("/proc/self/fd")) == before
    subprocess.run(["rm", "-rf", tmp_path / "top"], check=True)


def test_usage_does_not_follow_a_folder_that_becomes_a_link(tmp_path: Path) -> None:
    """Files outside a tree do not count while another process exchanges its folders with links."""
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir()
    for i in range(300):
        (outside / str(i)).touch()
    (top / "a").mkdir(parents=True)
    for i in range(20):
        (top / "a" / f"d{i}").mkdir()
    end = threading.Event()

    def exchange() -> None:
        while not end.is_set():
            for i in range(20):
                place = top / "a" / f"d{i}"
                place.rmdir()
                place.symlink_to(outside)
                place.unlink()
                place.mkdir()

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        assert all(usage(top)[1] <= 21 for _ in range(300))
    finally:
        end.set()
        thread.join()
