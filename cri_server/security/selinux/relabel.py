"""Files get a pod's label: what the server makes for a pod, and volumes whose mounts ask for it
(`selinux_relabel`).

This module is preloaded by the zygote: a volume is relabelled in an errand, for a tree may be large
or on storage that does not answer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from pyrunc.abi.file import AT_FDCWD, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV
from pyrunc.errors import InvalidArgument, KernelError, kernel_errors
from pyrunc.kernel.path import openat2
from pyrunc.kernel.tree import FOLDER, identity, open_folder
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

ERRAND = "cri_server.security.selinux.relabel:relabel"
ATTRIBUTE = "security.selinux"
# Of the system: with a pod's label on them other programs would lose them (CVE-2021-43816 and
# docker's `:Z` on /usr).
REFUSED = frozenset(
    ("/", "/bin", "/boot", "/dev", "/etc", "/etc/passwd", "/etc/pki", "/etc/shadow", "/home", "/lib", "/lib32", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/usr/share", "/var", "/var/cache", "/var/lib", "/var/lib/kubelet", "/var/log", "/var/run", "/var/tmp")
)  # fmt: skip
REFUSED_BELOW = ("/dev/", "/proc/", "/sys/")
# File systems without labels of their own, which NFS and others are, or that are read-only.
# A folder that something else has replaced; one on which another mount is, which keeps its labels.
PASSED_OVER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
INSIDE = RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
PATH_PARTS = 64  # of the names in an error
NO_LABELS = (errno.ENOTSUP, errno.EROFS)


class Relabel(Record):
    """Of `relabel`. `paths` have no symlinks in them."""

    paths: Sequence[AbsolutePath]
    mount_label: str


def relabel(arguments: Message, fds: list[int]) -> None:
    """The errand: the paths of a `Relabel` and all below each get its label. Raises
    InvalidArgument, KernelError."""
    asked = Relabel.of(arguments)
    for path in asked.paths:
        check_path(path)
        relabel_tree(path, asked.mount_label.encode())


def check_path(path: str) -> None:
    """Raises InvalidArgument for what is the system's."""
    plain = os.path.normpath(path)
    if plain in REFUSED or plain.startswith(REFUSED_BELOW):
        raise InvalidArgument(
            f"selinux_relabel: {path!r} is the system's and keeps its SELinux labels"
        )


def relabel_tree(path: str, label: bytes) -> None:
    """Label the file or folder at `path` and what is below it on the same mount. Links are
    labelled, never followed; what another program removes meanwhile is skipped. A file with a
    second name outside of the volume is one file with one label; link(2) makes no such name from a
    container, whose volumes are mounts of their own (EXDEV). Raises KernelError."""
    # The path was looked up before: a link in it now was put there since.
    top = openat2(AT_FDCWD, path, os.O_PATH, resolve=RESOLVE_NO_SYMLINKS)
    try:
        takes_labels = _set(f"/proc/self/fd/{top}", label, path, follow=True)
        if takes_labels and stat.S_ISDIR(os.fstat(top).st_mode):
            _relabel_below(_reopen(top, path), label, path)
    finally:
        os.close(top)


def _reopen(folder: int, path: str) -> int:
    """The folder as one that can be read; other users' folders on NFS refuse that (EACCES)."""
    with kernel_errors("open", repr(path)):
        return os.open(".", FOLDER, dir_fd=folder)


class _Level:
    """A folder on the way down: its name, what it is, and its folders that are still to be
    labelled."""

    __slots__ = ("identity", "left", "name")

    def __init__(self, name: str, fd: int, left: list[str]) -> None:
        self.name, self.identity, self.left = name, identity(fd), left


def _relabel_below(current: int, label: bytes, path: str) -> None:
    """Everything in the open folder, which is closed here. One descriptor and no recursion: a tree
    that a container has made may be deeper than both. Raises KernelError."""
    try:
        way = [_Level(path, current, _label_entries(current, label, path))]
        while way:
            if way[-1].left:
                name = way[-1].left.pop()
                try:
                    below = open_folder(current, name)
                except OSError as error:
                    if error.errno in PASSED_OVER:
                        continue
                    raise
                os.close(current)
                current = below
                named = "/".join(level.name for level in way[:PATH_PARTS])
                left = _label_entries(current, label, f"{named}/{name}")
                way.append(_Level(name, current, left))
                continue
            way.pop()
            if way:
                above = os.open("..", FOLDER, dir_fd=current)
                os.close(current)
                current = above
                if identity(current) != way[-1].identity:
                    raise KernelError(
                        "open", f"'..' below {path!r}", errno.ESTALE, "folders are moved"
                    )
    except OSError as error:
        raise KernelError.of(error, "open", f"a folder below {path!r}") from None
    finally:
        os.close(current)


def _label_entries(folder: int, label: bytes, named: str) -> list[str]:
    """Label what is in the folder; the names of its folders. Raises KernelError, OSError."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _label_entry(folder, entry.name, label, f"{named}/{entry.name}"):
                folders.append(entry.name)
    return folders


def _label_entry(folder: int, name: str, label: bytes, named: str) -> bool:
    """Label one entry unless a mount covers it; whether it is a folder. Raises KernelError.

    A path would lead to what is mounted there, file or folder: openat2(2) refuses it with EXDEV,
    and the descriptor stays on the same inode whatever takes the place of the name. O_PATH opens
    neither a FIFO nor a device.
    """
    try:
        place = openat2(folder, name, os.O_PATH | os.O_NOFOLLOW, resolve=INSIDE)
    except KernelError as error:
        if error.errno in PASSED_OVER:
            return False
        raise
    try:
        _set(f"/proc/self/fd/{place}", label, named, follow=True)
        return stat.S_ISDIR(os.fstat(place).st_mode)
    finally:
        os.close(place)


def set_label(path: str, label: str) -> None:
    """The label of one file or folder of the server's own. Raises KernelError."""
    _set(path, label.encode(), path, follow=False)


def _set(path: str, label: bytes, named: str, *, follow: bool) -> bool:
    """Whether the file takes labels: set unless it has this one. Raises KernelError naming `named`."""
    try:
        try:
            if os.getxattr(path, ATTRIBUTE, follow_symlinks=follow).rstrip(b"\0") == label:
                return True
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
        os.setxattr(path, ATTRIBUTE, label, follow_symlinks=follow)
        return True
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in NO_LABELS:
            return False
        raise KernelError.of(
            error, "setxattr", f"{ATTRIBUTE}={label.decode()} of {named!r}"
        ) from None
