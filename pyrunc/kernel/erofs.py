"""EROFS from files (Linux 6.12, CONFIG_EROFS_FS_BACKED_BY_FILE): no loop device, and nothing is
mounted anywhere."""

from __future__ import annotations

import os
from errno import ENOTBLK, ENXIO

from pyrunc.abi.mount import MOUNT_ATTR_RDONLY
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import KernelError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel import verity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


_COPIED_AT_ONCE = 1 << 20


def open_erofs(source: int, devices: Sequence[int]) -> int:
    """A detached, read-only mount of the image in the file behind `source`, with the data of its
    device table in `devices`.

    A tmpfs has no read_folio, which EROFS wants of the file with its superblock
    (erofs_fc_get_tree), though not of devices: from there it is copied to a ramfs, which has. The
    descriptors may be closed then. Raises KernelError: ENODEV without EROFS, ENOTBLK where it wants
    block devices.
    """
    try:
        return _open_erofs(source, devices)
    except KernelError as error:
        if error.errno != ENOTBLK:
            raise
    copy = _open_copy(source)
    try:
        return _open_erofs(copy, devices)
    finally:
        os.close(copy)


def _open_erofs(source: int, devices: Sequence[int]) -> int:
    options: list[tuple[str, str | None]] = [("device", _name(device)) for device in devices]
    return kernel_mount.open_mount(
        "erofs", [*options, ("ro", None)], attributes=MOUNT_ATTR_RDONLY, source=_name(source)
    )


def _open_copy(source: int) -> int:
    """The file's content, with its holes, in a file on a ramfs that is gone with its last user."""
    memory = kernel_mount.open_mount("ramfs")
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=memory)
    finally:
        os.close(memory)
    try:
        copy = os.open(
            "index", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
    finally:
        os.close(folder)
    try:
        at, size = 0, os.fstat(source).st_size
        os.ftruncate(copy, size)
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == ENXIO:  # a hole to the end
                    break
                raise
            end = os.lseek(source, at, os.SEEK_HOLE)
            while at < end:
                at += os.pwrite(copy, os.pread(source, min(end - at, _COPIED_AT_ONCE), at), at)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _name(fd: int) -> str:
    """By descriptor, for a string of fsconfig(2) has 255 bytes at most, and a path may lead
    elsewhere meanwhile."""
    return f"/proc/self/fd/{fd}"


def open_paths(source: str, devices: Sequence[str], digests: Sequence[str] = ()) -> int:
    """`open_erofs` of files by their paths, which are no links; `digests`: as `check_digests` has
    them. Raises KernelError, OSError, DamagedRecord."""
    fds: list[int] = []
    try:
        for path in (source, *devices):
            fds.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        check_digests(fds, digests)
        return open_erofs(fds[0], fds[1:])
    finally:
        for fd in fds:
            os.close(fd)


def check_digests(fds: Sequence[int], digests: Sequence[str]) -> None:
    """Whether files are sealed with these digests of fs-verity, in their order; no digests, or an
    empty one: it is not asked. Blocks that differ from what was sealed fail when they are read.
    Raises DamagedRecord, KernelError."""
    for fd, digest in zip(fds, digests, strict=bool(digests)):
        if digest and (found := verity.measure(fd)) != digest:
            name = os.readlink(_name(fd))
            has = f"has {found}" if found else "is not sealed any more"
            raise DamagedRecord(
                f"{name} is not what was written: fs-verity had {digest}, and it {has}"
            )
