"""Tests whether images can be mounted here, by mounting one. The kernel's version alone does not
tell this, because images need:

- EROFS mounts whose backing device is a regular file (Linux 6.12). The file system of the store
  must support such mounts, too;
- an overlay over an EROFS, and a second overlay over that one, for containers that run containers.
  Some kernels count EROFS as one of the two levels of stacking that they permit
  (FILESYSTEM_MAX_STACK_DEPTH).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from errno import ENODEV, ENOTBLK
from pathlib import Path

from cri_server.images.erofs.build import build
from cri_server.images.layers.inflate import UnpackLimits
from pyrunc.compile import host
from pyrunc.compile.image_mount import MountedImage, open_image, open_overlay_of
from pyrunc.errors import Error, KernelError, ResourceExhausted
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.mount import open_overlay

_CONTENT = b"a file in a tar"
_REASONS = {
    ENODEV: "the kernel has no EROFS (CONFIG_EROFS_FS)",
    ENOTBLK: (
        "the kernel mounts EROFS only from block devices"
        " (files need Linux 6.12 and CONFIG_EROFS_FS_BACKED_BY_FILE)"
    ),
}


def mount_obstacle(folder: Path) -> str:
    """Return why images in `folder` cannot be mounted; "" if they can. Leaves no files.

    Raises OSError, and ResourceExhausted when the disk has no room for the test.
    """
    try:
        place = Path(tempfile.mkdtemp(prefix="probe-", dir=folder))
        try:
            return _probe(place)
        finally:
            shutil.rmtree(place)
    except (KernelError, OSError) as error:
        if error.errno in FULL:
            raise ResourceExhausted(reason(error.errno or 0, str(folder))) from None
        raise


def sharing_obstacle() -> str:
    """Return why the containers of a mounted image do not share one page cache; "" if they do.
    Without sharing, each container has its own copy in memory of the data that it reads."""
    if host.constant_facts().clones_detached:
        return ""
    return (
        "each container would have its own mount and page cache"
        " (sharing needs Linux 6.15, which clones detached mounts)"
    )


def _probe(place: Path) -> str:
    for name in ("empty", "upper", "work", "second-upper", "second-work"):
        (place / name).mkdir()
    _make_image(place)
    try:
        image = MountedImage(str(place / "index"), (str(place / "tar"),), str(place / "empty"))
        with closing_fd(open_image(image, {})) as mount:
            overlay = open_overlay_of(
                [mount], [image.place], str(place / "upper"), str(place / "work"), ()
            )
        with closing_fd(overlay):
            if Path(f"/proc/self/fd/{overlay}/file").read_bytes() != _CONTENT:
                return "a file has the wrong content when read through EROFS"
            if host.constant_facts().clones_detached:
                second = (str(place / "second-upper"), str(place / "second-work"))
                os.close(open_overlay([overlay], *second))
    except (KernelError, OSError) as error:
        if error.errno in FULL:
            raise
        return _REASONS.get(error.errno or 0, str(error))
    except Error as error:
        return error.message
    return ""


def _make_image(place: Path) -> None:
    (place / "tar").write_bytes(_tar())
    with open(place / "tar", "rb") as tar_file, open(place / "index", "wb") as index:
        build([tar_file.fileno()], ["sha256:probe"], [0], index.fileno(), bytes(16), UnpackLimits())


def _tar() -> bytes:
    """Return a tar with one file (POSIX pax, "ustar Interchange Format")."""
    # Not from tarfile, which each server would import at its start and which takes 0.4 MiB.
    size_and_time = b"%011o\0%011o\0" % (len(_CONTENT), 0)
    before = b"file".ljust(100, b"\0") + b"0000644\0" + 2 * b"0000000\0" + size_and_time
    after = b"0".ljust(101, b"\0") + b"ustar\x0000"
    checksum = sum(before) + sum(b" " * 8) + sum(after)
    header = before + b"%06o\0 " % checksum + after
    end = bytes(1024)
    return header.ljust(512, b"\0") + _CONTENT.ljust(512, b"\0") + end
