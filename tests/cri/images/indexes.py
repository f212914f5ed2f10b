"""Writes and mounts EROFS images of layers' tars, like the server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cri_server.images.erofs.build import build
from cri_server.images.formats.digests import digest_of
from cri_server.images.layers.inflate import UnpackLimits
from pyrunc.kernel.erofs import open_paths


def write_index(
    folder: Path, tars: Sequence[bytes], limits: UnpackLimits | None = None
) -> tuple[Path, list[Path]]:
    """Write the layers' tars (bottom first) and the EROFS index of their image; return the paths of
    the index and of the tars."""
    different = list(dict.fromkeys(tars))
    devices = [folder / f"tar-{number}" for number in range(len(different))]
    for path, content in zip(devices, different, strict=True):
        path.write_bytes(content)
    fds = [os.open(path, os.O_RDONLY) for path in devices]
    index = folder / "index"
    try:
        with open(index, "wb") as file:
            build(
                fds,
                [digest_of(tar) for tar in different],
                [different.index(tar) for tar in tars],
                file.fileno(),
                bytes(range(16)),
                limits or UnpackLimits(),
            )
    finally:
        for fd in fds:
            os.close(fd)
    return index, devices


@contextmanager
def mounted(
    folder: Path, tars: Sequence[bytes], limits: UnpackLimits | None = None
) -> Iterator[Path]:
    """Mount the image of these layers (bottom first) for a `with` block; yield its root folder."""
    folder.mkdir(exist_ok=True)
    index, devices = write_index(folder, tars, limits)
    mount = open_paths(str(index), [str(path) for path in devices])
    try:
        yield Path(f"/proc/self/fd/{mount}")
    finally:
        os.close(mount)
