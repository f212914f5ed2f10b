"""Makes file systems in a file, for tests that need a full or unusual disk, or a power cut."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_ext4(path: Path, *options: str, size_bytes: int = 64 << 20) -> Path:
    """Make an image file at `path` for `mount -o loop`; `options` are mkfs.ext4's."""
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, path], check=True)
    return path


def snapshot(image: Path, copy: Path) -> Path:
    """Copy a mounted image file as a power cut would leave it: without the data that waits in the
    page cache."""
    subprocess.run(["cp", "--sparse=always", image, copy], check=True)
    return copy
