"""Implements the mount option `tmpcopyup`: makes a tmpfs with a copy of the image's files at its
mount point. The copy follows no symbolic link, because an image may be hostile."""

from __future__ import annotations

import os

from pyrunc.errors import KernelError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.copy_tree import copy_tree
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import clean, open_in_root
from pyrunc.kernel.tree import FOLDER
from pyrunc.plan.mounts import MountOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.spec.model import Mount


def open_copy(mount: Mount, root: int) -> int:
    """Make the tmpfs of `mount` as a detached mount, with a copy of the files that the root has at
    the mount point; return its descriptor. `root`: the root's descriptor. Raises KernelError, for
    example when the tmpfs is too small."""
    options = list(MountOptions(mount.options).data)
    try:
        # A link at the destination is followed inside the root, as the mount itself will be.
        source = open_in_root(root, clean(mount.destination), FOLDER & ~os.O_NOFOLLOW)
    # Nothing to copy: runc, too, mounts an empty tmpfs where there is no folder.
    except KernelError:
        return kernel_mount.open_mount("tmpfs", options, source=mount.source)
    with closing_fd(source):
        mount_fd = kernel_mount.open_mount("tmpfs", options, source=mount.source)
        try:
            with closing_fd(os.open(".", FOLDER, dir_fd=mount_fd)) as target:
                mode = os.fstat(target).st_mode
                copy_tree(source, target)
                if any(key == "mode" for key, _ in options):
                    os.fchmod(target, mode & 0o7777)
        except BaseException as error:
            os.close(mount_fd)
            if isinstance(error, OSError):
                raise KernelError.of(error, "tmpcopyup", f"'{mount.destination}'") from None
            raise
        return mount_fd
