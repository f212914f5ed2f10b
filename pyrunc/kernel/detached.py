"""Makes detached mounts that the kernel does not make directly, by entering a mount namespace for a
moment.

Linux 6.15 can clone a detached mount, and use it as a layer of an overlay. Older kernels require
that the mount is attached in the caller's mount namespace. Before Linux 6.7, overlayfs takes all
layers in one option string. So the functions here enter the namespace in which the mount is
attached, or a new private one, and then return to the caller's.

Only a single-threaded process can enter another mount namespace (setns(2)). The runtime's processes
are single-threaded. Any thread can make a private mount namespace, but from then on the thread has
a separate root and working directory (unshare(2)).
"""

from __future__ import annotations

import os
from contextlib import contextmanager

from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.file import AT_EMPTY_PATH, AT_FDCWD, AT_RECURSIVE
from pyrunc.abi.mount import MS_PRIVATE, MS_REC, OPEN_TREE_CLONE
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.namespace import open_namespace, open_own, setns, unshare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def _in_mount_namespace(path: str = "") -> Iterator[None]:
    """Run the `with` block in the mount namespace at `path`; if `path` is empty, in a private copy
    of the caller's. Then restore the caller's namespace and working directory."""
    # setns(2) sets root and working directory to the namespace's root, so the folder is entered
    # again at the end.
    own, folder = open_own("mnt"), os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if path:
            with closing_fd(open_namespace(path, "mnt")) as there:
                setns(there, CLONE_NEWNS)
        else:
            unshare(CLONE_NEWNS)
        try:
            if not path:
                # Else mounts that are made here would propagate to the host.
                kernel_mount.mount(None, "/", None, MS_REC | MS_PRIVATE)
            yield
        finally:
            setns(own, CLONE_NEWNS)
            os.fchdir(folder)
    finally:
        os.close(folder)
        os.close(own)


def open_clone_of(mount_fd: int, namespace: str) -> int:
    """Return a detached clone of a mount that is attached in the mount namespace at `namespace`.
    Raises KernelError."""
    with _in_mount_namespace(namespace):
        return kernel_mount.open_tree(mount_fd, "", OPEN_TREE_CLONE | AT_RECURSIVE | AT_EMPTY_PATH)


def open_folder(mount_fd: int, place: str, path: str) -> int:
    """Return a detached clone of one directory of a detached mount. Raises KernelError.

    - `place`: a directory at which the mount is attached for this call, in a private mount
      namespace
    - `path`: the directory in the mount, without symbolic links
    """
    with _in_mount_namespace():
        kernel_mount.move_mount(mount_fd, place)
        return kernel_mount.open_tree(AT_FDCWD, os.path.join(place, path), OPEN_TREE_CLONE)


def open_overlay(
    lower: Sequence[str],
    upper: str,
    work: str,
    flags: kernel_mount.Options = (),
    mapped: Sequence[int] = (),
) -> int:
    """Mount an overlay by mount(2) and return it detached. Layers are named relative to their
    common folder, because the options of mount(2) must fit a page. Raises KernelError.

    - `lower`: the layers' paths, top first
    - `mapped`: empty, or a detached, idmapped mount for each layer. The mount is attached over the
      layer's path in a private mount namespace, and becomes the layer.
    - `flags`: options without a value, and SELinux's `context`
    """
    folder = os.path.commonpath([os.path.dirname(path) for path in lower])
    names = [_escaped(os.path.relpath(path, folder)) for path in lower]
    options = [f"lowerdir={':'.join(names)}"]
    if upper:
        options += [f"upperdir={_escaped(upper)}", f"workdir={_escaped(work)}"]
    # A label may contain commas, so it is quoted. SELinux takes the quoted label out of the options
    # before the kernel splits them (selinux_sb_eat_lsm_opts).
    options += [key if value is None else f'{key}="{value}"' for key, value in flags]
    # The mount covers its own first layer, so that no folder is needed as a mount point: overlayfs
    # has looked its layers up by then.
    place = os.path.abspath(lower[0])
    with _in_mount_namespace():
        for layer, path in zip(mapped, lower, strict=False):
            kernel_mount.move_mount(layer, path)
        os.chdir(folder)
        kernel_mount.mount("overlay", place, "overlay", 0, ",".join(options))
        return kernel_mount.open_tree(AT_FDCWD, place, OPEN_TREE_CLONE)


def _escaped(path: str) -> str:
    """Escape a path for an option of overlayfs: a backslash goes before each `\\`, `:` (overlayfs
    splits there) and `,` (the kernel splits options there)."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
