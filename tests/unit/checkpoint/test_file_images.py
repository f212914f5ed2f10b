"""Tests that the root folder's mode is read from made-up CRIU image files; tests/vm/peers reads
those of the real CRIU."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pyrunc.checkpoint import file_images
from pyrunc.checkpoint.criu import message
from pyrunc.errors import InvalidArgument
from tests.support import criu_images

HEAD = criu_images.files()


def root_mode(folder: Path, content: bytes) -> int | None:
    (folder / file_images.FILES).write_bytes(content)
    return file_images.root_mode(str(folder))


def test_root_mode_returns_the_mode_of_the_root_only(tmp_path: Path) -> None:
    tree = {
        "/bin/sh": stat.S_IFREG | 0o755,
        "/data": stat.S_IFDIR | 0o700,
        "/": stat.S_IFDIR | 0o1555,
    }
    assert root_mode(tmp_path, criu_images.files(tree)) == 0o1555


def test_images_without_the_roots_mode_give_none(tmp_path: Path) -> None:
    assert file_images.root_mode(str(tmp_path)) is None
    assert root_mode(tmp_path, HEAD) is None
    assert root_mode(tmp_path, criu_images.files({"/": None, "/bin": stat.S_IFDIR | 0o700})) is None
    pipe = criu_images.entry(message([(1, 2), (2, 5), (18, b"")]))
    assert root_mode(tmp_path, HEAD + pipe) is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "does not begin"),
        (b"\x19\x43\x56\x54\x00\x00\x00\x00", "does not begin"),
        (HEAD + b"\x05", "ends within"),
        (HEAD + b"\x05\x00\x00\x00ab", "ends within"),
        (HEAD + b"\x00\x00\x00\x00", "ends within"),
        (HEAD + b"\xff\xff\xff\xff" + b"x" * 10, "too large"),
        (HEAD + criu_images.entry(b"\x1a\x7f"), "malformed entry"),
        (HEAD + criu_images.entry(message([(3, b"\x0f")])), "malformed entry"),
    ],
)
def test_damaged_images_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        root_mode(tmp_path, content)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(HEAD)
    (tmp_path / file_images.FILES).symlink_to("there")
    with pytest.raises(OSError, match="symbolic links"):
        file_images.root_mode(str(tmp_path))
