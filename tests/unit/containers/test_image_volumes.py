"""Tests how a folder of an image is found in its layers: which layers are merged, hidden or
refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cri_server.containers.image_volumes import _folders
from pyrunc.errors import InvalidArgument


def layers(tmp_path: Path, *contents: str) -> list[str]:
    """Make a folder for each layer, top layer first, with the sub-folders that its string names."""
    paths = []
    for number, words in enumerate(contents):
        layer = tmp_path / str(number)
        layer.mkdir()
        for word in words.split():
            (layer / word).mkdir(parents=True, exist_ok=True)
        paths.append(str(layer))
    return paths


def layer_numbers(folders: list[str]) -> list[str]:
    """Return the number of the layer to which each of `folders` belongs."""
    return [Path(path).parts[-3] for path in folders]


def test_folders_of_all_layers_are_folders(tmp_path: Path) -> None:
    stack = layers(tmp_path, "a/b", "other", "a/b a/c")
    assert (
        layer_numbers(_folders(stack, "a/b"))
        == ["0", "2"]
        == layer_numbers(_folders(stack, "./a//b/"))
    )


def test_a_layer_hides_folders_of_lower_layers(tmp_path: Path) -> None:
    stack = layers(tmp_path, "a/b", "a/b", "a/b")
    os.setxattr(Path(stack[1], "a"), "trusted.overlay.opaque", b"y")
    assert layer_numbers(_folders(stack, "a/b")) == ["0", "1"]
    Path(stack[1], "a", "b").rmdir()
    os.mknod(Path(stack[1], "a", "b"), 0o020000, os.makedev(0, 0))
    assert layer_numbers(_folders(stack, "a/b")) == ["0"]
    Path(stack[0], "a", "b").rmdir()
    with pytest.raises(InvalidArgument, match="not a folder"):
        _folders(stack, "a/b")


@pytest.mark.parametrize("target", ["v2", "./v2", "/v2", "../../../v2", "loop/../x/../v2", "chain"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_links_are_followed_inside_the_image(tmp_path: Path, target: str, count: int) -> None:
    """A link in one layer leads to folders of several layers. Absolute targets and `..` stay inside
    the image."""
    stack = layers(tmp_path, "v2/b loop/x", "v2/b/c", "v2/b")[:count]
    Path(stack[-1], "current").symlink_to(target)
    Path(stack[0], "chain").symlink_to("/v2")
    assert layer_numbers(_folders(stack, "current/b")) == ["0", "1", "2"][:count]


def test_links_that_lead_nowhere_and_files_are_refused(tmp_path: Path) -> None:
    stack = layers(tmp_path, "x", "a/b")
    Path(stack[0], "a").symlink_to("/etc")
    Path(stack[0], "round").symlink_to("round")
    Path(stack[0], "file").touch()
    for path, why in (
        ("a/b", "not a folder"),
        ("a", "not a folder"),
        ("round", "symbolic"),
        ("file/b", "not a folder"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            _folders(stack, path)
