"""Detached mounts where the kernel cannot make them directly: from a mount namespace that is
entered for a moment.

Linux 6.15 clones mounts that are attached nowhere and takes them as an overlay's layers, 6.7 takes
layers one by one. Before, a mount must be attached in the caller's mount namespace to be cloned or
to be a layer: so the namespace that has it is entered, or a private one made, and left again. The
first only a single-threaded process can do (setns(2)), as the runtime's are; the second any thread,
which has its own root and working directory from then on (unshare(2)).
"""

from __future__ import annotations

import os
from contextlib import contextmanager

from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.file import AT_EMPTY_PATH, AT_FDCWD, AT_RECURSIVE
from pyrunc.abi.mount import MS_PRIVATE, MS_REC, OPEN_TREE_CLONE
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.namespace import open_namespace, open_own, setns, unshare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def _elsewhere(path: str = "") -> Iterator[None]:
    """In the mount namespace at `path`, without one in a private copy of ours. Our working
    directory is restored."""
    own, folder = open_own("mnt"), os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if path:
            there = open_namespace(path, "mnt")
            try:
                setns(there, CLONE_NEWNS)
            finally:
                os.close(there)
        else:
            unshare(CLONE_NEWNS)
        try:
            if not path:
                kernel_mount.mount(None, "/", None, MS_REC | MS_PRIVATE)
            yield
        finally:
            setns(own, CLONE_NEWNS)
            os.fchdir(folder)
    finally:
        os.close(folder)
        os.close(own)


def open_clone_of(mount_fd: int, namespace: str) -> int:
    """A detached clone of a mount that is attached in the mount namespace at that path.
    KernelError."""
    with _elsewhere(namespace):
        return kernel_mount.open_tree(mount_fd, "", OPEN_TREE_CLONE | AT_RECURSIVE | AT_EMPTY_PATH)


def open_folder(mount_fd: int, place: str, path: str) -> int:
    """A detached clone of the directory `path` of a detached mount, which is put on the directory
    `place` for the moment.

    `path` leads over no link. Raises KernelError.
    """
    with _elsewhere():
        kernel_mount.move_mount(mount_fd, place)
        return kernel_mount.open_tree(AT_FDCWD, os.path.join(place, path), OPEN_TREE_CLONE)


def open_overlay(
    lower: Sequence[str],
    upper: str,
    work: str,
    given: kernel_mount.Options = (),
    mapped: Sequence[int] = (),
) -> int:
    """A detached overlay by mount(2), whose options must fit a page: layers are named from the
    folder they share.

    `mapped` has a detached mount for each lower layer, which is put in its place for the moment: so
    the overlay takes it with its id map, which no path of ours has. `given`: flags, and SELinux's
    `context`.
    """
    folder = os.path.commonpath([os.path.dirname(path) for path in lower])
    names = [_escaped(os.path.relpath(path, folder)) for path in lower]
    options = [f"lowerdir={':'.join(names)}"]
    if upper:
        options += [f"upperdir={_escaped(upper)}", f"workdir={_escaped(work)}"]
    # A label has commas: SELinux takes it out of the options before they are split, with its quotes
    # (selinux_sb_eat_lsm_opts).
    options += [key if value is None else f'{key}="{value}"' for key, value in given]
    place = os.path.abspath(lower[0])
    with _elsewhere():
        for layer, path in zip(mapped, lower, strict=False):
            kernel_mount.move_mount(layer, path)
        os.chdir(folder)
        kernel_mount.mount("overlay", place, "overlay", 0, ",".join(options))
        return kernel_mount.open_tree(AT_FDCWD, place, OPEN_TREE_CLONE)


def _escaped(path: str) -> str:
    """Overlayfs splits at `:`, the option string at `,`; both take a backslash."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
