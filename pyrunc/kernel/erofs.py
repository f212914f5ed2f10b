"""Mounts EROFS images from files, detached and without a loop device (Linux 6.12,
CONFIG_EROFS_FS_BACKED_BY_FILE)."""

from __future__ import annotations

import os
from errno import ENOTBLK

from pyrunc.abi.mount import MOUNT_ATTR_RDONLY
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import KernelError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel import verity
from pyrunc.kernel.copy_tree import copy_data
from pyrunc.kernel.fd import close_all, closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def open_erofs(source: int, devices: Sequence[int]) -> int:
    """Mount the EROFS image in the file `source` read-only; return the detached mount. `devices`:
    the data files, in the order of the image's device table. The caller may then close its
    descriptors.

    The file system of `source` must have `read_folio` (erofs_fc_get_tree). A tmpfs lacks it, so an
    image on a tmpfs is first copied to a ramfs. Raises KernelError: ENODEV without EROFS, ENOTBLK
    from kernels that mount only block devices.
    """
    try:
        return _open_erofs(source, devices)
    except KernelError as error:
        # ENOTBLK is EROFS's answer for a file without read_folio.
        if error.errno != ENOTBLK:
            raise
    with closing_fd(_open_copy(source)) as copy:
        return _open_erofs(copy, devices)


def _open_erofs(source: int, devices: Sequence[int]) -> int:
    options: list[tuple[str, str | None]] = [("device", _name(device)) for device in devices]
    return kernel_mount.open_mount(
        "erofs", [*options, ("ro", None)], attributes=MOUNT_ATTR_RDONLY, source=_name(source)
    )


def _open_copy(source: int) -> int:
    """Copy the content of the file `source`, with its holes, to a new file on a ramfs; return the
    new file's descriptor. The ramfs exists until this descriptor and its duplicates are closed."""
    # Detached, so the copy ends with the mount of the image, which holds the file open.
    with closing_fd(kernel_mount.open_mount("ramfs")) as memory:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=memory)
    with closing_fd(folder):
        copy = os.open(
            "index", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
    try:
        # Holes stay holes, because a ramfs is memory that cannot be swapped out.
        copy_data(source, copy, os.fstat(source).st_size)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _name(fd: int) -> str:
    """Return the descriptor's path in /proc/self/fd for fsconfig(2), whose strings have at most 255
    bytes. The file's own path may be longer, or may by now lead to another file."""
    return f"/proc/self/fd/{fd}"


def open_paths(source: str, devices: Sequence[str], digests: Sequence[str] = ()) -> int:
    """Open the image's file and its devices by path, and mount them by `open_erofs`. Raises
    KernelError, OSError (also for a symbolic link), DamagedRecord.

    `digests`: the expected fs-verity digests of `source` and of each device. Without digests, or
    for an empty digest, nothing is checked.
    """
    fds: list[int] = []
    try:
        for path in (source, *devices):
            fds.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        check_digests(fds, digests)
        return open_erofs(fds[0], fds[1:])
    finally:
        close_all(fds)


def check_digests(fds: Sequence[int], digests: Sequence[str]) -> None:
    """Check that fs-verity has sealed each file with the digest at the same index of `digests`. The
    kernel refuses to read changed blocks of a sealed file. Without digests, and for an empty
    digest, nothing is checked. Raises KernelError, and DamagedRecord if a digest differs."""
    for fd, digest in zip(fds, digests, strict=bool(digests)):
        if digest and (measured := verity.measure(fd)) != digest:
            name = os.readlink(_name(fd))
            state = f"now has {measured}" if measured else "is not sealed any more"
            raise DamagedRecord(
                f"{name} is not the file that was written: its fs-verity digest was {digest}, and"
                f" the file {state}"
            )
