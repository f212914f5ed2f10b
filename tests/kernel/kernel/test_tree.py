"""Tests the removal of trees of untrusted processes: deep, full of links, with mounts inside, and
while others remove files, too."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest

from pyrunc.abi.mount import MS_BIND
from pyrunc.kernel.mount import mount
from pyrunc.kernel.tree import remove_path, remove_tree

DEPTH = 5000  # a path of 10 000 bytes; PATH_MAX is 4096


def make_deep(top: Path, target: Path) -> None:
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=here)
        os.symlink(target, "link", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)


def test_remove_tree_removes_deep_trees_and_follows_no_links(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    (outside / "keep").touch()
    make_deep(top, outside)
    before = len(os.listdir("/proc/self/fd"))
    remove_path(top)
    remove_path(top)
    assert not top.exists() and (outside / "keep").exists()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["file", "link", "fifo", "missing"])
def test_remove_tree_also_removes_a_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "it"
    {
        "file": lambda: path.touch(),
        "link": lambda: path.symlink_to("folder"),
        "fifo": lambda: os.mkfifo(path),
        "missing": lambda: None,
    }[kind]()
    parent = os.open(tmp_path, os.O_PATH)
    remove_tree(parent, b"it")
    os.close(parent)
    assert os.listdir(tmp_path) == ["folder"]
    remove_path(tmp_path / "no" / "such")


def test_names_of_any_bytes_are_removed(tmp_path: Path) -> None:
    top = os.fsencode(tmp_path / "top")
    for name in (b"\xff\xfe", b"-rf", b" ", b"new\nline"):
        os.makedirs(top + b"/" + name + b"/" + name)
    remove_path(tmp_path / "top")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("bind", [True, False])
def test_remove_tree_does_not_touch_mounts(tmp_path: Path, bind: bool) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    for folder in (outside, top / "a" / "mounted", top / "b" / "c"):
        folder.mkdir(parents=True)
    (outside / "keep").touch()
    here = top / "a" / "mounted"
    if bind:
        mount(outside, here, None, MS_BIND)
    else:
        mount("tmpfs", here, "tmpfs")
    try:
        if not bind:
            (here / "keep").touch()
        with pytest.raises(OSError) as caught:
            remove_path(top)
        assert caught.value.errno == errno.EXDEV
        assert (here / "keep").exists() and (outside / "keep").exists()
    finally:
        subprocess.run(["umount", here], check=True)
    remove_path(top)
    assert not top.exists() and outside.exists()


def test_several_threads_may_remove_the_same_tree(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for n in range(300):
        (top / str(n) / "x" / "y").mkdir(parents=True)
        (top / str(n) / "x" / "file").touch()
    failed: list[BaseException] = []

    def remove() -> None:
        try:
            remove_path(top)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not top.exists()
