"""Implements the mount option `tmpcopyup`: makes a tmpfs with a copy of the image's files at its
mount point. The copy follows no symbolic link, because an image may be hostile."""

from __future__ import annotations

import os
from errno import EPERM
from stat import S_ISDIR, S_ISLNK, S_ISREG

from pyrunc.errors import KernelError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import clean, open_in_root, open_regular_at
from pyrunc.plan.mounts import MountOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.spec.model import Mount

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 30


def open_copy(mount: Mount, root: int) -> int:
    """Make the tmpfs of `mount` as a detached mount, with a copy of the files that the root has at
    the mount point; return its descriptor. `root`: the root's descriptor. Raises KernelError, for
    example when the tmpfs is too small."""
    options = list(MountOptions(mount.options).data)
    try:
        # A link at the destination is followed inside the root, as the mount itself will be.
        source = open_in_root(root, clean(mount.destination), _FOLDER & ~os.O_NOFOLLOW)
    # Nothing to copy: runc, too, mounts an empty tmpfs where there is no folder.
    except KernelError:
        return kernel_mount.open_mount("tmpfs", options, source=mount.source)
    with closing_fd(source):
        status = os.fstat(source)
        if not any(key == "mode" for key, _ in options):
            options.insert(0, ("mode", f"{status.st_mode & 0o7777:o}"))
        mount_fd = kernel_mount.open_mount("tmpfs", options, source=mount.source)
        try:
            with closing_fd(os.open(".", _FOLDER, dir_fd=mount_fd)) as target:
                os.fchown(target, status.st_uid, status.st_gid)
                _copy(source, target)
        except OSError as error:
            os.close(mount_fd)
            raise KernelError.of(error, "tmpcopyup", f"'{mount.destination}'") from None
        return mount_fd


def _copy(source: int, target: int) -> None:
    """Copy all that is in the folder `source` to the folder `target`."""
    for name in os.listdir(source):
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        if S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif S_ISDIR(status.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            below = os.open(name, _FOLDER, dir_fd=source)
            copy = os.open(name, _FOLDER, dir_fd=target)
            try:
                _copy(below, copy)
            finally:
                os.close(below)
                os.close(copy)
        elif S_ISREG(status.st_mode):
            _copy_file(source, target, name)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
        _copy_attributes(status, target, name)


def _copy_file(source: int, target: int, name: str) -> None:
    with (
        closing_fd(open_regular_at(source, name)) as reading,
        closing_fd(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        ) as writing,
    ):
        while os.sendfile(writing, reading, None, _CHUNK_BYTES):
            pass
        for attribute in os.listxattr(reading):
            try:
                os.setxattr(writing, attribute, os.getxattr(reading, attribute))
            except OSError:
                pass  # a tmpfs does not have the attribute, or we may not set it


def _copy_attributes(status: os.stat_result, target: int, name: str) -> None:
    """Copy owner, mode and times. The owner first: chown(2) clears set-user-ID bits."""
    try:
        os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    except OSError as error:
        # Root of a user namespace may not give files to ids that it does not map.
        if error.errno != EPERM:
            raise
    if not S_ISLNK(status.st_mode):
        os.chmod(name, status.st_mode & 0o7777, dir_fd=target)
    os.utime(
        name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False
    )
