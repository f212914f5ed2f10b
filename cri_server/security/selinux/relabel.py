"""Sets SELinux labels of files: on the files that the server makes for a pod, and on volumes whose
mounts request it (`selinux_relabel`).

A volume is relabelled in a job (a process forked by the zygote), because it may have many files or
lie on storage that does not answer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from pyrunc.abi.file import AT_FDCWD, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV
from pyrunc.errors import InvalidArgument, KernelError, kernel_errors
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import openat2
from pyrunc.kernel.tree import FOLDER, walk
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

JOB = "cri_server.security.selinux.relabel:relabel"
ATTRIBUTE = "security.selinux"
# Paths of the system: with a pod's label other programs would lose access to them
# (CVE-2021-43816 and docker's `:Z` on /usr).
REFUSED = frozenset(
    (
        "/", "/bin", "/boot", "/dev", "/etc", "/etc/passwd", "/etc/pki", "/etc/shadow",
        "/home", "/lib", "/lib32", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root",
        "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib",
        "/usr/lib64", "/usr/sbin", "/usr/share", "/var", "/var/cache", "/var/lib",
        "/var/lib/kubelet", "/var/log", "/var/run", "/var/tmp",
    )
)  # fmt: skip
REFUSED_BELOW = ("/dev/", "/proc/", "/sys/")
# With one of these errors an entry keeps its label: the entry was removed or replaced meanwhile, or
# a mount covers it.
SKIPPED_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
BENEATH_MOUNT = RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
PATH_PARTS = 64  # the depth to which an error names a path
# File systems that store no labels, such as NFS, and read-only ones.
NO_LABELS = (errno.ENOTSUP, errno.EROFS)


class Relabel(Record):
    """The arguments of `relabel`. `paths` contain no symlinks."""

    paths: Sequence[AbsolutePath]
    mount_label: str


def relabel(arguments: Message, fds: list[int]) -> None:
    """Run the job: label the paths of a `Relabel` request and everything below them. Raises
    KernelError, and InvalidArgument for a folder that must keep its labels (`check_path`)."""
    request = Relabel.of(arguments)
    for path in request.paths:
        check_path(path)
        relabel_tree(path, request.mount_label.encode())


def check_path(path: str) -> None:
    """Raise InvalidArgument for a folder of the host's system that must keep its labels, such as
    /etc, /var/log or any path below /dev, /proc and /sys."""
    plain = os.path.normpath(path)
    if plain in REFUSED or plain.startswith(REFUSED_BELOW):
        raise InvalidArgument(
            f"selinux_relabel: {path!r} belongs to the system and keeps its SELinux labels"
        )


def relabel_tree(path: str, label: bytes) -> None:
    """Label the file or folder at `path` and everything below it on the same mount. Labels symlinks
    themselves, not their targets; skips files that another process removes meanwhile. Raises
    KernelError.

    A file that also has a hard link outside the volume has the new label there, too. A container
    cannot make such a link, because a volume is a separate mount (link(2), EXDEV).
    """
    # The caller has resolved the path: a symlink in it was placed there since, and is refused.
    with closing_fd(openat2(AT_FDCWD, path, os.O_PATH, resolve=RESOLVE_NO_SYMLINKS)) as top:
        takes_labels = _set(f"/proc/self/fd/{top}", label, path, follow=True)
        if takes_labels and stat.S_ISDIR(os.fstat(top).st_mode):
            _relabel_below(_reopen(top, path), label, path)


def _reopen(folder: int, path: str) -> int:
    """Open `folder`, a descriptor with O_PATH, again for reading. Return the new descriptor. Raises
    KernelError; on NFS also for folders of other users (EACCES)."""
    with kernel_errors("open", repr(path)):
        return os.open(".", FOLDER, dir_fd=folder)


def _relabel_below(top: int, label: bytes, path: str) -> None:
    """Label everything below the open folder `top`, then close this descriptor. `path`: the path of
    the folder, for error messages. Raises KernelError."""

    def label_entries(folder: int, names: Sequence[str]) -> list[str]:
        return _label_entries(folder, label, "/".join([path, *names[:PATH_PARTS]]))

    try:
        for _ in walk(top, label_entries, lambda error: error.errno in SKIPPED_ERRNOS):
            pass
    except OSError as error:
        note = "a folder was moved" if error.errno == errno.ESTALE else ""
        raise KernelError.of(error, "open", f"a folder below {path!r}", note) from None


def _label_entries(folder: int, label: bytes, shown_path: str) -> list[str]:
    """Label the files and folders that lie directly in `folder`; return the names of the folders
    among them. Raises OSError if `folder` cannot be read, KernelError for an entry in it."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _label_entry(folder, entry.name, label, f"{shown_path}/{entry.name}"):
                folders.append(entry.name)
    return folders


def _label_entry(folder: int, name: str, label: bytes, shown_path: str) -> bool:
    """Label the file or folder `name` in `folder`; return whether it is a folder that can be
    entered. Skips a mount point. Raises KernelError."""
    # RESOLVE_NO_XDEV refuses a mount point (EXDEV); an operation by path would label the mounted
    # file. The descriptor stays on the same inode even if the name is replaced. O_PATH opens
    # neither a FIFO nor a device.
    try:
        place = openat2(folder, name, os.O_PATH | os.O_NOFOLLOW, resolve=BENEATH_MOUNT)
    except KernelError as error:
        if error.errno in SKIPPED_ERRNOS:
            return False
        raise
    with closing_fd(place):
        _set(f"/proc/self/fd/{place}", label, shown_path, follow=True)
        return stat.S_ISDIR(os.fstat(place).st_mode)


def set_label(path: str, label: str) -> None:
    """Label one of the server's own files or folders. Raises KernelError."""
    _set(path, label.encode(), path, follow=False)


def _set(path: str, label: bytes, shown_path: str, *, follow: bool) -> bool:
    """Label the file at `path`, unless it has this label. Return False if the file system does not
    support labels or is read-only. `shown_path`: the file's path in error messages; `follow`: label
    the target of a symlink. Raises KernelError."""
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
            error, "setxattr", f"{ATTRIBUTE}={label.decode()} of {shown_path!r}"
        ) from None
