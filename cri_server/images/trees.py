"""Folders of unpacked files, entered over no symbolic link."""

from __future__ import annotations

import os

from pyrunc.kernel.path import open_beneath


def open_folder(root_fd: int, path: bytes) -> int:
    """The directory at `path` beneath the root, readable; the caller closes it. Raises KernelError."""
    return open_beneath(root_fd, path or b".", os.O_RDONLY | os.O_DIRECTORY)
