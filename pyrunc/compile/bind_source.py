"""Opens the source of a bind mount on the host, once, as an O_PATH descriptor, and reads the facts
about the source that plans need (`BindSource`).

Storage such as FUSE or NFS may never answer, neither to an open nor to fstat(2) of the open
descriptor. The command line opens its sources itself. The server opens them for its shims, in a
thread that it can abandon.
"""

from __future__ import annotations

import os
from errno import ELOOP, ENOTDIR
from stat import S_ISDIR

from pyrunc.abi.file import AT_FDCWD, O_CLOEXEC, O_PATH, RESOLVE_NO_SYMLINKS
from pyrunc.errors import KernelError
from pyrunc.kernel.fd import closing_fd, read_file
from pyrunc.kernel.path import openat2
from pyrunc.plan.model import LINK_CAME
from pyrunc.records import Record


class BindSource(Record):
    """The source of a bind mount. `path`: the source's real path; empty if our mount namespace does
    not have the source. `is_our_root`: the source is the root directory of our process."""

    path: str
    is_directory: bool
    is_our_root: bool = False

    @property
    def is_in_every_namespace(self) -> bool:
        """Return whether the container's process, in a copy of our mount namespace, can open the
        source by its path and bind it. False for:

        - a pipe, which has no path
        - a file of another mount namespace, to which a link through /proc/PID/root leads; the
          kernel refuses to bind it (EINVAL)
        - paths below /proc, where the process sees other files than we do
        - our own root directory: the process has mounted the container's root there, and the bind
          would include this mount
        """
        return (
            self.path.startswith("/")
            and not self.path.startswith("/proc/")
            and not self.is_our_root
        )


def open_source(source: str, destination: str, *, links: bool) -> int:
    """Open the source of a bind mount as an O_PATH descriptor, which the caller closes. Without
    `links`, a symbolic link in `source` is an error (ELOOP). `destination`: the mount point, for
    the error's text. Raises KernelError."""
    number = 0
    for flags in (O_PATH | os.O_DIRECTORY, O_PATH):  # the first triggers an automount
        try:
            if links:
                return os.open(source, flags | O_CLOEXEC)  # a third of openat2's time
            return openat2(AT_FDCWD, source, flags, resolve=RESOLVE_NO_SYMLINKS)
        except (KernelError, OSError) as error:
            number = error.errno or 0
            if number != ENOTDIR:
                break
    # ELOOP: a neighbour has swapped a part of the path for a link since it was looked up
    # (CVE-2021-25741).
    raise bind_failed(
        source, destination, number, LINK_CAME if number == ELOOP and not links else ""
    )


def describe_source(number: int, path: str = "") -> BindSource:
    """Describe the source of a bind mount, which is open as descriptor `number`. `path`: the
    source's real path, if the caller knows it. The call blocks while the storage does not answer.
    Raises OSError."""
    status, own = os.fstat(number), os.stat("/")
    return BindSource(
        path or _real_path(number),
        S_ISDIR(status.st_mode),
        (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino),
    )


def _real_path(number: int) -> str:
    """Return the path of an open file; empty if that path does not lead to the same file in the
    same mount."""
    path = os.readlink(f"/proc/self/fd/{number}")
    try:
        # The path of a file in another mount namespace may be another file's in ours.
        with closing_fd(os.open(path, O_PATH | os.O_NOFOLLOW | O_CLOEXEC)) as again:
            return path if _mount_and_inode(number) == _mount_and_inode(again) else ""
    except OSError:  # a pipe, or a file that has no path here
        return ""


def _mount_and_inode(number: int) -> list[bytes]:
    """Return the lines `mnt_id` and `ino` of an open file (proc_pid_fdinfo(5)); unlike fstat(2),
    this does not access the file's storage."""
    lines = read_file(f"/proc/self/fdinfo/{number}").split(b"\n")
    return [line for line in lines if line.startswith((b"mnt_id:", b"ino:"))]


def bind_failed(source: str, destination: str, number: int, note: str = "") -> KernelError:
    """Return the error of a failed bind mount, in the words of `pyrunc plan`: `bind 'SOURCE' on
    'DESTINATION': ERRNO`. `number`: the errno; `note`: an explanation, may be empty."""
    return KernelError("bind", f"'{source}' on '{destination}'", number, note)
