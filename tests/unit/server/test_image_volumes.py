"""What an image shows at a folder, found in its layers: merged, hidden, refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cri_server.containers.image_volumes import _merged
from pyrunc.errors import InvalidArgument


def layers(tmp_path: Path, *contents: str) -> list[str]:
    """One folder per layer, top first, each with the folders of its words."""
    found = []
    for number, words in enumerate(contents):
        layer = tmp_path / str(number)
        layer.mkdir()
        for word in words.split():
            (layer / word).mkdir(parents=True, exist_ok=True)
        found.append(str(layer))
    return found


def shown(found: list[str]) -> list[str]:
    """Which layers take part."""
    return [Path(path).parts[-3] for path in found]


def test_folders_of_all_layers_are_merged(tmp_path: Path) -> None:
    stack = layers(tmp_path, "a/b", "other", "a/b a/c")
    assert shown(_merged(stack, "a/b")) == ["0", "2"] == shown(_merged(stack, "./a//b/"))


def test_a_layer_hides_what_lies_below(tmp_path: Path) -> None:
    stack = layers(tmp_path, "a/b", "a/b", "a/b")
    os.setxattr(Path(stack[1], "a"), "trusted.overlay.opaque", b"y")
    assert shown(_merged(stack, "a/b")) == ["0", "1"]
    Path(stack[1], "a", "b").rmdir()
    os.mknod(Path(stack[1], "a", "b"), 0o020000, os.makedev(0, 0))
    assert shown(_merged(stack, "a/b")) == ["0"]
    Path(stack[0], "a", "b").rmdir()
    with pytest.raises(InvalidArgument, match="not a folder"):
        _merged(stack, "a/b")


def test_symlinks_and_files_are_refused(tmp_path: Path) -> None:
    stack = layers(tmp_path, "x", "a/b")
    Path(stack[0], "a").symlink_to("/etc")
    with pytest.raises(InvalidArgument, match="symlink"):
        _merged(stack, "a/b")
    Path(stack[0], "file").touch()
    with pytest.raises(InvalidArgument, match="not a folder"):
        _merged(stack, "file/b")
