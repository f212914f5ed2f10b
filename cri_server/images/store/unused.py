"""Lists the files of the image store that no image needs, with their sizes: blobs, unpacked layers,
tars, EROFS indexes, and remains of pulls and removals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cri_server.images.formats.digests import hex_of
from pyrunc.kernel.usage import usage

KNOWN_NAMES = {
    "oci-layout",
    "index.json",
    "names.json",
    "blobs",
    "layers",
    "tars",
    "indexes",
    "verity",
    "ingest",
    "trash",
    "empty",
    "lowest",
}


@dataclass(frozen=True, slots=True)
class UnusedEntry:
    """A file or folder of the store that no image needs. `kind`: blob, layer (unpacked), tar,
    index, download (left in `ingest/`), trash or unknown."""

    kind: str
    path: Path
    size_bytes: int


FOLDERS = (
    ("blob", "blobs/sha256"),
    ("blob", "blobs/sha512"),
    ("layer", "layers"),
    ("tar", "tars"),
    ("index", "indexes"),
)


def unused(root: Path, used: Mapping[str, set[str]]) -> Iterator[UnusedEntry]:
    """Yield every file and folder of the store at `root` that no image uses. `used`: the digests
    that images use, by kind. Slow: run it in a thread."""
    for kind, folder in FOLDERS:
        yield from _entries(kind, root / folder, {hex_of(digest) for digest in used[kind]})
    yield from _entries("download", root / "ingest", ())
    yield from _entries("trash", root / "trash", ())
    yield from _entries("unknown", root, KNOWN_NAMES)


def _entries(kind: str, folder: Path, used: Iterable[str]) -> Iterator[UnusedEntry]:
    used_names = set(used)
    for name in sorted(os.listdir(folder) if folder.is_dir() else ()):
        if name not in used_names:
            yield UnusedEntry(kind, folder / name, size_of(folder / name))


def size_of(path: Path) -> int:
    """Return the bytes on disk of a file, or of a folder with its contents; 0 if it cannot be
    read."""
    try:
        if path.is_dir() and not path.is_symlink():
            return usage(path)[0]
        # Not st_size: tars have holes. The unit is 512 bytes on every file system (stat(2)).
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0
