"""Clones pinned mounts: detached mounts that several containers share, such as a pod's /dev/shm."""

from __future__ import annotations

from errno import EINVAL

from pyrunc.abi.file import AT_EMPTY_PATH, AT_RECURSIVE
from pyrunc.abi.mount import OPEN_TREE_CLONE
from pyrunc.errors import KernelError, Unsupported
from pyrunc.kernel import mount as kernel_mount


def clone(mount: int, namespace: str = "") -> int:
    """Return a detached clone of `mount`, a descriptor of a pinned mount. Raises KernelError.

    Linux before 6.15 can clone a mount only if it is attached in the caller's mount namespace. On
    such a kernel, `namespace` must be the path of a mount namespace in which `mount` is attached.
    Raises Unsupported if `namespace` is empty there.
    """
    try:
        return kernel_mount.open_tree(mount, "", OPEN_TREE_CLONE | AT_RECURSIVE | AT_EMPTY_PATH)
    except KernelError as error:
        # EINVAL: an older kernel clones only mounts of the caller's mount namespace (__do_loopback,
        # fs/namespace.c).
        if error.errno != EINVAL:
            raise
    if not namespace:
        raise Unsupported("this kernel cannot clone a detached mount (Linux 6.15 can)")
    from pyrunc.kernel import detached

    return detached.open_clone_of(mount, namespace)
