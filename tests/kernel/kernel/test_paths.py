"""Paths beneath a root: nothing leads outside, links are followed inside, missing folders are
made, trees are removed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.errors import KernelError
from pyrunc.kernel import path as paths


def os_open(path: Path | str) -> int:
    """Return an O_PATH descriptor of a directory, beneath which a test resolves paths."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a folder `root` with links that stay inside and links that lead out, and a folder
    `outside` beside it."""
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
    """Provide a descriptor of the folder `root` of `tree`."""
    fd = os_open(tree / "root")
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    "name", ["real/file", "/real/file", "abs/file", "rel/file", "up/file", "../../real/file"]
)
def test_links_and_dots_of_a_path_stay_inside_the_root(root: int, name: str) -> None:
    fd = paths.open_in_root(root, name, os.O_RDONLY)
    with open(fd) as file:
        assert file.read() == "inside"


@pytest.mark.parametrize(
    ("name", "number"),
    [("out/file", errno.ENOENT), ("loop", errno.ELOOP), ("dangling", errno.ENOENT)],
)
def test_open_in_root_does_not_leave_the_root(root: int, name: str, number: int) -> None:
    with pytest.raises(KernelError) as caught:
        paths.open_in_root(root, name)
    assert caught.value.errno == number
    assert f"'{name}'" in str(caught.value)


def test_a_link_of_procfs_is_refused(root: int) -> None:
    proc = os_open("/proc")
    try:
        with pytest.raises(KernelError, match="ELOOP"):
            paths.open_in_root(proc, "self/root")
        with pytest.raises(KernelError, match="ELOOP"):
            paths.open_beneath(proc, "self/cwd", links=True)
    finally:
        os.close(proc)


@pytest.mark.parametrize(
    ("name", "number"),
    [("../outside", errno.EXDEV), ("/real", errno.EXDEV), ("rel/file", errno.ELOOP)],
)
def test_open_beneath_refuses_links_and_paths_that_leave(root: int, name: str, number: int) -> None:
    with pytest.raises(KernelError) as caught:
        paths.open_beneath(root, name)
    assert caught.value.errno == number


def test_open_beneath_follows_links_that_stay_beneath(root: int) -> None:
    os.close(paths.open_beneath(root, "rel/file", links=True))
    with pytest.raises(KernelError, match="EXDEV"):
        paths.open_beneath(root, "abs/file", links=True)


def test_opened_descriptors_are_close_on_exec(root: int) -> None:
    fd = paths.open_in_root(root, "real")
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_path_is_opened_while_others_rename(tree: Path, root: int) -> None:
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
def test_clean_normalizes_a_path(path: str, expected: str) -> None:
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
def test_resolve_follows_links_and_dangling_links(root: int, path: str, expected: str) -> None:
    assert paths.resolve(root, path) == expected


def test_resolve_gives_up_on_a_loop(root: int) -> None:
    with pytest.raises(KernelError, match="ELOOP"):
        paths.resolve(root, "/loop/x")


def test_only_regular_files_up_to_the_limit_are_read(tree: Path, root: int) -> None:
    assert paths.read_in_root(root, "/abs/file") == b"inside"
    with pytest.raises(KernelError, match="EFBIG"):
        paths.read_in_root(root, "real/file", 3)
    os.mkfifo(tree / "root/fifo")
    with pytest.raises(KernelError, match="not a regular file"):
        paths.read_in_root(root, "fifo")
    with pytest.raises(KernelError, match="ENOENT"):
        paths.read_in_root(root, "out/file")


def test_a_path_with_a_nul_is_refused(root: int) -> None:
    with pytest.raises(KernelError, match="NUL"):
        paths.open_in_root(root, "real\0/../../etc")


def test_readlinkat_returns_the_target_of_a_link(root: int) -> None:
    assert paths.readlinkat(root, "rel") == "real"
    with pytest.raises(KernelError, match="readlinkat 'real': EINVAL"):
        paths.readlinkat(root, "real")
