"""Lists the content of a folder, so that tests can compare two states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path


def listing(root: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Return a dict: path below `root` -> mode, owner and content; leaves out the paths
    `without`."""
    entries = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if os.path.relpath(f"{folder}/{name}", root) not in without
        ]
        for name in [*folders, *names]:
            path = Path(folder, name)
            status = path.lstat()
            key = str(path.relative_to(root))
            if key not in without:
                entries[key] = (
                    f"{status.st_mode:o} {status.st_uid}:{status.st_gid} {_content(path)}"
                )
    return entries


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
