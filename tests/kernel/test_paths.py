"""Paths beneath a root: nothing leads outside, links are followed inside, what is missing is made, trees are removed."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.errors import KernelError
from pyrunc.kernel import path as paths


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """`root` with links that try everything, `outside` beside it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "real/deep").mkdir(parents=True)
    (root / "real/file").write_text("inside")
    outside.mkdir()
    (outside / "file").write_text("outside")
    for name, target in {
        "abs": "/real",
        "rel": "real",
        "up": "../../../../real",
        "out": str(outside),
        "dangling": "/run/missing",
        "run2": "dangling/more",
        "loop": "loop",
        "proc": "/proc/self/root",
    }.items():
        (root / name).symlink_to(target)
    return tmp_path


@pytest.fixture
def root(tree: Path) -> Iterator[int]:
    """A descriptor of `root`."""
    fd = paths.open_root(tree / "root")
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    "name", ["real/file", "/real/file", "abs/file", "rel/file", "up/file", "../../real/file"]
)
def test_links_and_dots_stay_inside(root: int, name: str) -> None:
    fd = paths.open_in_root(root, name, os.O_RDONLY)
    with open(fd) as file:
        assert file.read() == "inside"


@pytest.mark.parametrize(
    ("name", "number"), [("out/file", errno.ENOENT), ("loop", errno.ELOOP), ("dangling", errno.ENOENT)]
)
def test_what_would_leave_is_not_there(root: int, name: str, number: int) -> None:
    with pytest.raises(KernelError) as caught:
        paths.open_in_root(root, name)
    assert caught.value.errno == number
    assert f"'{name}'" in str(caught.value)


def test_a_link_of_procfs_is_refused(root: int) -> None:
    proc = paths.open_root("/proc")
    try:
        with pytest.raises(KernelError, match="ELOOP"):
            paths.open_in_root(proc, "self/root")
        with pytest.raises(KernelError, match="ELOOP"):
            paths.open_beneath(proc, "self/cwd", links=True)
    finally:
        os.close(proc)


@pytest.mark.parametrize(
    ("name", "number"), [("../outside", errno.EXDEV), ("/real", errno.EXDEV), ("rel/file", errno.ELOOP)]
)
def test_beneath_refuses_what_leaves_and_links(root: int, name: str, number: int) -> None:
    with pytest.raises(KernelError) as caught:
        paths.open_beneath(root, name)
    assert caught.value.errno == number


def test_beneath_with_links(root: int) -> None:
    os.close(paths.open_beneath(root, "rel/file", links=True))
    with pytest.raises(KernelError, match="EXDEV"):
        paths.open_beneath(root, "abs/file", links=True)


def test_everything_is_close_on_exec(root: int) -> None:
    fd = paths.open_in_root(root, "real")
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_retries_while_others_rename(tree: Path, root: int) -> None:
    stop = threading.Event()

    def rename() -> None:
        here = tree / "outside"
        while not stop.is_set():
            os.rename(here / "file", here / "other")
            os.rename(here / "other", here / "file")

    thread = threading.Thread(target=rename)
    thread.start()
    try:
        for _ in range(3000):
            os.close(paths.open_in_root(root, "real/../real/deep/../file"))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/./b/../c//", "/a/c"),
        ("../..", "/"),
        ("", "/"),
        ("a", "/a"),
        ("/a/../../b", "/b"),
        ("/..a/b..", "/..a/b.."),
    ],
)
def test_clean(path: str, expected: str) -> None:
    assert paths.clean(path) == expected
    assert "/" + "/".join(paths.components(path)) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/real/file", "/real/file"),
        ("abs/new/x", "/real/new/x"),
        ("/up/deep/..", "/real"),
        ("/dangling", "/run/missing"),
        ("/dangling/x/../y", "/run/missing/y"),
        ("/run2", "/run/missing/more"),
        ("/../../rel", "/real"),
        ("/missing/../real", "/real"),
        ("/", "/"),
    ],
)
def test_resolve_follows_links_also_those_that_dangle(root: int, path: str, expected: str) -> None:
    assert paths.resolve(root, path) == expected


def test_resolve_gives_up_on_a_loop(root: int) -> None:
    with pytest.raises(KernelError, match="ELOOP"):
        paths.resolve(root, "/loop/x")


def test_directories_are_made_and_opened(tree: Path, root: int) -> None:
    for path in ("new/a/b", "/abs/c/d", "real/deep", "/", "up/x/../y"):
        fd = paths.open_directories(root, path, 0o750)
        assert paths.is_directory(fd)
        os.close(fd)
    assert stat.S_IMODE((tree / "root/new/a/b").stat().st_mode) == 0o750
    assert (tree / "root/real/c/d").is_dir() and (tree / "root/real/y").is_dir()
    assert os.listdir(tree / "outside") == ["file"]


def test_new_directories_get_their_owner_and_old_ones_keep_it(tree: Path, root: int) -> None:
    os.close(paths.open_directories(root, "real/owned/deep", 0o700, 123, 456))
    assert ((tree / "root/real/owned").stat().st_uid, (tree / "root/real/owned/deep").stat().st_gid) == (
        123,
        456,
    )
    assert (tree / "root/real").stat().st_uid == 0


@pytest.mark.parametrize("path", ["dangling/x", "real/file/x", "loop/x"])
def test_directories_that_cannot_be(tree: Path, root: int, path: str) -> None:
    with pytest.raises(KernelError):
        paths.open_directories(root, path)
    assert os.listdir(tree / "outside") == ["file"]


def test_the_parent_and_the_last_name(root: int) -> None:
    fd, name = paths.open_parent(root, "/abs/deep/../leaf")
    assert name == "leaf"
    assert os.path.samestat(os.fstat(fd), os.stat("real", dir_fd=root))
    os.close(fd)
    with pytest.raises(KernelError, match="EINVAL"):
        paths.open_parent(root, "/..")


def test_reading_has_limits(tree: Path, root: int) -> None:
    assert paths.read_in_root(root, "/abs/file") == b"inside"
    with pytest.raises(KernelError, match="EFBIG"):
        paths.read_in_root(root, "real/file", 3)
    os.mkfifo(tree / "root/fifo")
    with pytest.raises(KernelError, match="not a regular file"):
        paths.read_in_root(root, "fifo")
    with pytest.raises(KernelError, match="ENOENT"):
        paths.read_in_root(root, "out/file")


def test_writing_beneath(tree: Path, root: int) -> None:
    paths.write_beneath(root, "real/file", b"changed")
    assert (tree / "root/real/file").read_text() == "changed"
    with pytest.raises(KernelError, match="ELOOP"):
        paths.write_beneath(root, "rel/file", b"x")
    with pytest.raises(KernelError, match="ENOENT"):
        paths.write_beneath(root, "real/missing", b"x")


def test_single_names(tree: Path, root: int) -> None:
    assert paths.mkdirat(root, "one")
    assert not paths.mkdirat(root, "one", exist_ok=True)
    with pytest.raises(KernelError, match="mkdirat 'one': EEXIST"):
        paths.mkdirat(root, "one")
    paths.symlinkat("/real", root, "link")
    assert paths.readlinkat(root, "link") == "/real"
    with pytest.raises(KernelError, match="EINVAL"):
        paths.readlinkat(root, "one")
    fd = paths.open_new_file(root, "file", 0o600)
    os.write(fd, b"x")
    os.close(fd)
    with pytest.raises(KernelError, match="EEXIST"):
        paths.open_new_file(root, "file")
    paths.linkat(root, "file", root, "hard")
    assert os.stat("hard", dir_fd=root).st_nlink == 2
    paths.renameat2(root, "hard", root, "renamed")
    with pytest.raises(KernelError, match="EEXIST"):
        paths.renameat2(root, "renamed", root, "file", 1)
    paths.fchownat(root, "link", 7, 8)
    assert os.lstat(tree / "root/link").st_uid == 7
    assert (tree / "root/real").stat().st_uid == 0
    paths.mknodat(root, "null", stat.S_IFCHR | 0o600, 1, 3)
    assert os.stat("null", dir_fd=root).st_rdev == os.makedev(1, 3)
    assert paths.unlinkat(root, "one", directory=True)
    assert not paths.unlinkat(root, "one", missing_ok=True)
    with pytest.raises(KernelError, match="ENOENT"):
        paths.unlinkat(root, "one")


def test_trees_are_removed_and_links_are_not_followed(tree: Path, root: int) -> None:
    (tree / "root/real/deep/out").symlink_to(tree / "outside")
    (tree / "root/real/deep/more").mkdir()
    paths.remove_tree(root, "real")
    paths.remove_tree(root, "real")
    paths.remove_tree(root, "out")
    assert not (tree / "root/real").exists()
    assert (tree / "outside/file").read_text() == "outside"


@pytest.mark.parametrize("levels", [49, 50, 51, 52, 3000])
def test_a_tree_of_many_levels_is_removed(tmp_path: Path, levels: int) -> None:
    root = paths.open_root(tmp_path)
    try:
        directory = os.dup(root)
        for level in range(levels):
            for name in ("d", "e"):
                paths.mkdirat(directory, name)
            os.close(paths.open_new_file(directory, f"file {level}"))
            below = paths.open_beneath(directory, "d")
            os.close(directory)
            directory = below
        os.close(directory)
        paths.remove_tree(root, "d")
        assert sorted(os.listdir(tmp_path)) == ["e", "file 0"]
    finally:
        os.close(root)


def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    root = paths.open_root("/proc")
    try:
        with pytest.raises(KernelError, match=r"E(PERM|ACCES|NOENT)"):
            paths.remove_tree(root, "sys/kernel")
    finally:
        os.close(root)


def test_a_nul_is_refused(root: int) -> None:
    with pytest.raises(KernelError, match="NUL"):
        paths.open_in_root(root, "real\0/../../etc")
