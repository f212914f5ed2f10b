"""Files get a pod's label: what the server makes for a pod, and volumes whose mounts ask for it (`selinux_relabel`).

This module is preloaded by the zygote: a volume is relabelled in an errand, for a tree may be large or on storage that does not
answer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from pyrunc.abi.file import AT_FDCWD, RESOLVE_NO_SYMLINKS
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel.path import openat2
from pyrunc.kernel.tree import FOLDER, identity, open_folder
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

ERRAND = "cri_server.selinux.relabel:relabel"
ATTRIBUTE = "security.selinux"
# Of the system: with a pod's label on them other programs would lose them (CVE-2021-43816 and docker's `:Z` on /usr).
REFUSED = frozenset(
    ("/", "/bin", "/boot", "/dev", "/etc", "/etc/passwd", "/etc/pki", "/etc/shadow", "/home", "/lib", "/lib32", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/usr/share", "/var", "/var/cache", "/var/lib", "/var/lib/kubelet", "/var/log", "/var/run", "/var/tmp")
)  # fmt: skip
REFUSED_BELOW = ("/dev/", "/proc/", "/sys/")
# File systems without labels of their own, which NFS and others are, or that are read-only.
# A folder that something else has replaced; one on which another mount is, which keeps its labels.
PASSED_OVER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
PATH_PARTS = 64  # of the names in an error
NO_LABELS = (errno.ENOTSUP, errno.EROFS)


class Relabel(Record):
    """Of `relabel`. `paths` have no symlinks in them."""

    paths: Sequence[AbsolutePath]
    mount_label: str


def relabel(arguments: Message, fds: list[int]) -> None:
    """The errand: the paths of a `Relabel` and all below each get its label. Raises InvalidArgument, KernelError."""
    asked = Relabel.of(arguments)
    for path in asked.paths:
        check_path(path)
        relabel_tree(path, asked.mount_label.encode())


def check_path(path: str) -> None:
    """Raises InvalidArgument for what is the system's."""
    plain = os.path.normpath(path)
    if plain in REFUSED or plain.startswith(REFUSED_BELOW):
        raise InvalidArgument(f"selinux_relabel: {path!r} is the system's and keeps its SELinux labels")


def relabel_tree(path: str, label: bytes) -> None:
    """The file or folder at `path` and what is below it on the same file system. Links are labelled, never followed; what another
    program removes meanwhile is skipped. Raises KernelError."""
    # The path was looked up before: a link in it now was put there since.
    top = openat2(AT_FDCWD, path, os.O_PATH, resolve=RESOLVE_NO_SYMLINKS)
    try:
        if not _set(f"/proc/self/fd/{top}", label, path, follow=True) or not stat.S_ISDIR(
            os.fstat(top).st_mode
        ):
            return
        _relabel_below(os.open(".", FOLDER, dir_fd=top), label, path)
    finally:
        os.close(top)


class _Level:
    """A folder on the way down: its name, what it is, and its folders that are still to be labelled."""

    __slots__ = ("identity", "left", "name")

    def __init__(self, name: str, fd: int, left: list[str]) -> None:
        self.name, self.identity, self.left = name, identity(fd), left


def _relabel_below(current: int, label: bytes, path: str) -> None:
    """Everything in the open folder, which is closed here. One descriptor and no recursion: a tree
    that a container has made may be deeper than both. Raises KernelError."""
    device = os.fstat(current).st_dev
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
                left = []
                if os.fstat(current).st_dev == device:
                    left = _label_entries(current, label, f"{named}/{name}")
                way.append(_Level(name, current, left))
                continue
            way.pop()
            if way:
                above = os.open("..", FOLDER, dir_fd=current)
                os.close(current)
                current = above
                if identity(current) != way[-1].identity:
                    raise KernelError("open", f"'..' below {path!r}", errno.ESTALE, "folders are moved")
    except OSError as error:
        raise KernelError("open", f"a folder below {path!r}", error.errno or 0) from None
    finally:
        os.close(current)


def _label_entries(folder: int, label: bytes, named: str) -> list[str]:
    """Label what is in the folder; the names of its folders. Raises KernelError, OSError."""
    device, folders = os.fstat(folder).st_dev, []
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and not _is_on(device, entry.name, folder):
                continue
            # The folder is the one that is open: nobody can put a link in its place.
            _set(f"/proc/self/fd/{folder}/{entry.name}", label, f"{named}/{entry.name}", follow=False)
            if is_folder:
                folders.append(entry.name)
    return folders


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
        raise KernelError(
            "setxattr", f"{ATTRIBUTE}={label.decode()} of {named!r}", error.errno or 0
        ) from None


def _is_on(device: int, name: str, folder: int) -> bool:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_dev == device
    except FileNotFoundError:
        return False
