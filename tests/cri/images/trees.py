"""Reads a folder into a dict for comparison: path -> properties that an unpacker restores."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Facts:
    """The properties of one file of a folder."""

    kind: str
    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    content: str
    device: int
    links: frozenset[bytes]  # all names of the file; empty for a directory
    xattrs: frozenset[tuple[str, bytes]]


def snapshot(root: Path | bytes, *, times: bool = True) -> dict[bytes, Facts]:
    """Return a dict: path relative to `root` -> properties, of `root` and all files below it."""
    top = os.fsencode(root)
    statuses = {os.path.relpath(path, top): os.lstat(path) for path in _walk(top)}
    same: dict[tuple[int, int], set[bytes]] = {}
    for name, facts in statuses.items():
        if not stat.S_ISDIR(facts.st_mode):
            same.setdefault((facts.st_dev, facts.st_ino), set()).add(name)
    return {
        name: Facts(
            kind=stat.filemode(facts.st_mode)[0],
            mode=stat.S_IMODE(facts.st_mode),
            owner=(facts.st_uid, facts.st_gid),
            mtime_ns=facts.st_mtime_ns if times else 0,
            content=_content(os.path.join(top, name), facts),
            device=facts.st_rdev,
            links=frozenset(same.get((facts.st_dev, facts.st_ino), set())),
            xattrs=frozenset(_xattrs(os.path.join(top, name))),
        )
        for name, facts in statuses.items()
    }


def _walk(top: bytes) -> Iterator[bytes]:
    yield top
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            # overlayfs lists a whiteout in a folder that only one layer has
            if os.path.lexists(path):
                yield path


def _content(path: bytes, facts: os.stat_result) -> str:
    if stat.S_ISLNK(facts.st_mode):
        return os.fsdecode(os.readlink(path))
    if stat.S_ISREG(facts.st_mode):
        with open(path, "rb") as file:
            return f"{facts.st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    return ""


def _xattrs(path: bytes) -> Iterator[tuple[str, bytes]]:
    for name in os.listxattr(path, follow_symlinks=False):
        yield name, os.getxattr(path, name, follow_symlinks=False)


def names(root: Path) -> set[str]:
    """Return the paths, relative to `root`, of all files and folders below it."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}
