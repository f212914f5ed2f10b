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
        device = os.fstat(top).st_dev
        for place, folders, files, folder in os.fwalk(".", dir_fd=top, onerror=_refuse_unreadable):
            folders[:] = [name for name in folders if _is_on(device, name, folder)]
            for name in (*folders, *files):
                # The folder is the one that is open: nobody can put a link in its place.
                _set(f"/proc/self/fd/{folder}/{name}", label, os.path.join(path, place, name), follow=False)
    finally:
        os.close(top)


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


def _refuse_unreadable(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise KernelError("readdir", repr(error.filename), error.errno or 0) from None
