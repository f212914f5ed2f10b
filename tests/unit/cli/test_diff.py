"""Tests the comparison of a writable layer with an image."""

from __future__ import annotations

import os
from pathlib import Path

from cri_server.cli.containers.diff import changes


def test_links_in_the_layer_or_the_image_are_not_followed(tmp_path: Path) -> None:
    outside, upper, lower = (tmp_path / name for name in ("outside", "upper", "lower"))
    for folder in (outside, upper, lower):
        folder.mkdir()
    (outside / "secret").touch()
    # The layer is read as root, and the container can make links in it.
    (upper / "out").symlink_to(outside)
    (lower / "replaced").symlink_to(outside)
    (upper / "replaced").mkdir()
    (upper / "replaced" / "secret").touch()
    fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (upper, lower)]
    try:
        assert list(changes(*fds)) == [("A", b"out"), ("C", b"replaced"), ("A", b"replaced/secret")]
    finally:
        for each in fds:
            os.close(each)
