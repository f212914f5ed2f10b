"""Makes `files.img`, CRIU's image of open files."""

from __future__ import annotations

from collections.abc import Mapping
from struct import pack

from pyrunc.checkpoint.criu import message
from pyrunc.checkpoint.file_images import COMMON_MAGIC, FILES_MAGIC


def entry(content: bytes) -> bytes:
    """Return a message of a CRIU image with its length before it."""
    return pack("<I", len(content)) + content


def files(modes: Mapping[str, int | None] | None = None) -> bytes:
    """Return `files.img` with a regular file for each path; where a mode is None, the entry has no
    st_mode."""
    content = pack("<II", COMMON_MAGIC, FILES_MAGIC)
    for number, (path, mode) in enumerate((modes or {}).items(), 1):
        fields = [] if mode is None else [(10, mode)]
        regular = message([(1, number), (2, 0), (3, 0), (5, b""), (6, path), (7, 0), *fields])
        content += entry(message([(1, 1), (2, number), (3, regular)]))
    return content
