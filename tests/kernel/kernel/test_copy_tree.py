"""Tests that a copy equals its source tree, however deep, sparse or odd."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyrunc.abi.clone import CLONE_NEWUSER
from pyrunc.compile.copyup import open_copy
from pyrunc.kernel import mount
from pyrunc.kernel.copy_tree import copy_tree
from pyrunc.kernel.namespace import unshare
from pyrunc.kernel.tree import remove_path
from pyrunc.spec.model import Mount
from tests.cri.images.trees import snapshot

FOLDER = os.O_RDONLY | os.O_DIRECTORY


def copied(source: Path, target: Path) -> None:
    """Make the folder `target` and copy the tree `source` to it."""
    target.mkdir()
    fds = os.open(source, FOLDER), os.open(target, FOLDER)
    try:
        copy_tree(*fds)
    finally:
        for fd in fds:
            os.close(fd)


def open_copied(source: Path, target: Path) -> int:
    copied(source, target)
    return os.open(target, FOLDER)


def open_copied_up(source: Path, target: Path) -> int:
    """Copy the tree to a tmpfs, as for `tmpcopyup`."""
    target.mkdir()
    root = os.open(source.parent, os.O_PATH)
    mount_fd = open_copy(Mount(f"/{source.name}", "tmpfs", "tmpfs", ("tmpcopyup",)), root)
    try:
        return os.open(".", FOLDER, dir_fd=mount_fd)
    finally:
        os.close(mount_fd)
        os.close(root)


def test_a_copy_equals_its_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/file").write_bytes(os.urandom(300_000))
    os.link(source / "a/file", source / "a/b/other")
    os.link(source / "a/file", source / "third")
    (source / "link").symlink_to("/etc/passwd")
    os.symlink("x", os.fsencode(source) + b"/\xff\n")
    os.mkfifo(source / "pipe", 0o640)
    os.mknod(source / "null", 0o20666, os.makedev(1, 3))
    os.mknod(source / "whiteout", 0o20000, 0)
    for name, uid, mode in (("a", 5, 0o2750), ("a/file", 6, 0o4755), ("pipe", 7, 0o606)):
        os.chown(source / name, uid, uid + 1)
        (source / name).chmod(mode)
    os.chown(source / "link", 8, 9, follow_symlinks=False)
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(source / "a/file", "security.capability", capability)
    os.setxattr(source / "a", "user.note", b"x")
    for name in ("a", "a/b", "a/file", "link"):
        os.utime(source / name, ns=(10**18, 10**18 + 1), follow_symlinks=False)
    copied(source, tmp_path / "copy")
    assert snapshot(tmp_path / "copy") == snapshot(source)
    assert os.getxattr(tmp_path / "copy/a/file", "security.capability") == capability
    assert os.getxattr(tmp_path / "copy/a", "user.note") == b"x"
    one, two, three = (os.stat(tmp_path / "copy" / n) for n in ("a/file", "a/b/other", "third"))
    assert one.st_ino == two.st_ino == three.st_ino != (source / "third").stat().st_ino


def test_holes_stay_holes(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with open(tmp_path / "source/sparse", "wb") as file:
        file.seek(1 << 30)
        file.write(b"middle")
        file.truncate(1 << 36)
    copied(tmp_path / "source", tmp_path / "copy")
    with open(tmp_path / "copy/sparse", "rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 20
        assert file.seek(0, os.SEEK_END) == 1 << 36
        file.seek(1 << 30)
        assert file.read(7) == b"middle\0"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process open more than 1024 descriptors: as many as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("copy", [open_copied, open_copied_up])
def test_a_tree_deeper_than_the_recursion_limit_is_copied(
    tmp_path: Path, copy: Callable[[Path, Path], int]
) -> None:
    (tmp_path / "source").mkdir()
    levels = sys.getrecursionlimit() + 50
    fds = [os.open(tmp_path / "source", FOLDER)]
    for _ in range(levels):
        os.mkdir("d", dir_fd=fds[-1])
        fds.append(os.open("d", FOLDER, dir_fd=fds[-1]))
        os.close(fds.pop(0))
    os.close(fds.pop())
    fd, depth = copy(tmp_path / "source", tmp_path / "copy"), 0
    while os.listdir(fd):
        below = os.open("d", FOLDER, dir_fd=fd)
        os.close(fd)
        fd, depth = below, depth + 1
    os.close(fd)
    for name in ("source", "copy"):
        remove_path(tmp_path / name)  # pytest's own removal recurses
    assert depth == levels


def test_an_owner_that_the_user_namespace_does_not_map_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").touch()
    (source / "link").symlink_to("file")
    os.setxattr(source / "file", "user.note", b"x")
    for name in ("file", "link"):
        os.chown(source / name, 4321, 4321, follow_symlinks=False)
    pid = os.fork()
    if pid == 0:
        try:
            unshare(CLONE_NEWUSER)
            for name, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
                Path(f"/proc/self/{name}").write_text(text)
            copied(source, tmp_path / "copy")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    for name in ("file", "link"):
        status = (tmp_path / "copy" / name).lstat()
        assert (status.st_uid, status.st_gid) == (0, 0)
    assert os.getxattr(tmp_path / "copy/file", "user.note") == b"x"


def test_a_copy_that_does_not_fit_is_an_error_and_leaks_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "source/below").mkdir(parents=True)
    (tmp_path / "source/below/big").write_bytes(os.urandom(1 << 20))
    small = mount.open_mount("tmpfs", [("size", "64k")])
    source, target = os.open(tmp_path / "source", FOLDER), os.open(".", FOLDER, dir_fd=small)
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError) as caught:
            copy_tree(source, target)
        assert caught.value.errno == errno.ENOSPC
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        for fd in (source, target, small):
            os.close(fd)
