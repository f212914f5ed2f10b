"""Prepares stdin, stdout and stderr of a process that is about to start: their owner, and private
null devices instead of the host's.

If stdin were the host's /dev/null, the container's root could change the mode and owner of that
inode for the whole machine. fchmod(2) and fchown(2) on the descriptor need only CAP_FOWNER and
CAP_CHOWN, which containers have. A private null device is a separate inode in a detached tmpfs that
only this runtime uses.

With SELinux a private null device gets the label of the host's /dev/null. If it had the label of
the runtime's files, the kernel would deny access at each execve(2), log the denial, and replace the
descriptor by the kernel's null device.
"""

from __future__ import annotations

import os
import time
from errno import EACCES, EINVAL, EPERM, EROFS
from stat import S_IFCHR, S_ISCHR

from pyrunc.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE = os.makedev(1, 3)
REFUSED = (EPERM, EACCES)
SELINUX, LABEL = "/sys/fs/selinux/enforce", "security.selinux"

_folder: tuple[int, int] | None = None  # the prepared tmpfs: its descriptor and its device
# The label of the host's device; empty without SELinux, None before it was looked up.
_label: bytes | None = None


def own_nulls(stdio: Sequence[int]) -> tuple[Sequence[int], int]:
    """Replace each null device in `stdio` by one private null device. Returns the new stdio, and
    the private device's descriptor, which the caller closes. The descriptor is -1 when there was
    nothing to replace."""
    nulls = [is_null(number) for number in stdio]
    if not any(nulls):
        return stdio, -1
    own = open_null()
    return [own if null else number for null, number in zip(nulls, stdio, strict=True)], own


def give_to(owner: int, stdio: Sequence[int]) -> None:
    """Make `owner`, a uid on the host, the owner of the files in `stdio`, so that the process can
    open /dev/stdout again. Skips null devices. Raises KernelError."""
    for number in stdio:
        status = os.fstat(number)
        if status.st_uid == owner or (S_ISCHR(status.st_mode) and status.st_rdev == DEVICE):
            continue
        try:
            # /proc/self/fd/1 is opened with the file's own permissions: a pipe of root could not be
            # opened by the user (runc does the same).
            os.fchown(number, owner, -1)
        except OSError as error:
            # EINVAL: the id is not mapped; setresuid will fail and report that.
            # EPERM: the caller's file may be another user's, when we are root of a user namespace.
            # EROFS: the file of a read-only mount.
            if error.errno not in (EINVAL, EPERM, EROFS):
                raise KernelError.of(error, "fchown", f"stdio {number}") from None


def is_null(number: int) -> bool:
    """Return whether the descriptor `number` is a null device, the host's or a private one."""
    status = os.fstat(number)
    return S_ISCHR(status.st_mode) and status.st_rdev == DEVICE


def open_null() -> int:
    """Open a nameless null device. Takes 15 µs after `prepare_nulls`, 140 µs without. Raises
    KernelError.

    Where devices cannot be made (in a user namespace, without CAP_MKNOD), opens the host's
    /dev/null. There the container cannot change the host's device.
    """
    # A pipe whose other end is closed would be cheaper, but a program that opens /dev/stdin would
    # wait for a writer.
    prepared = _prepared()
    try:
        folder = prepared or _open_folder()
        try:
            return _make_null(folder)
        finally:
            if not prepared:
                os.close(folder)
    except (KernelError, OSError) as error:
        if error.errno not in REFUSED:
            raise KernelError("mknod", "a null device", error.errno or 0) from None
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def _make_null(folder: int) -> int:
    name = f"{os.getpid()}.{time.monotonic_ns()}"  # a fork has the same folder
    # In a tmpfs that the initial user namespace owns: in a tmpfs of another user namespace no
    # device can be opened.
    os.mknod(name, S_IFCHR | 0o666, DEVICE, dir_fd=folder)
    try:
        os.chmod(name, 0o666, dir_fd=folder)  # mknod(2) applies our umask
        number = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=folder)
    finally:
        # Without a name the inode ends with its last descriptor, and nothing has to be cleaned up
        # after a kill.
        os.unlink(name, dir_fd=folder)
    if label := _host_label():
        try:
            os.setxattr(number, LABEL, label)
        except OSError:  # the policy refuses it: then the kernel replaces the device
            pass
    return number


def _host_label() -> bytes:
    """Return the SELinux label of the host's /dev/null; empty without SELinux. Every domain may use
    a device with this label."""
    global _label
    if _label is None:
        _label = b""
        if os.path.exists(SELINUX):
            try:
                _label = os.getxattr("/dev/null", LABEL)
            except OSError:
                pass
    return _label


def prepare_nulls() -> None:
    """Open the tmpfs of null devices in advance, so that `open_null` is faster in this process and
    in its forks. Does nothing where devices cannot be made."""
    global _folder
    _host_label()
    try:
        number = _open_folder()
    except KernelError as error:
        if error.errno not in REFUSED:
            raise
    else:
        _folder = number, os.fstat(number).st_dev


def _prepared() -> int | None:
    """Return the descriptor of the tmpfs that `prepare_nulls` has opened. None without that call,
    and in a fork that has closed the descriptor."""
    if _folder is None:
        return None
    number, device = _folder
    try:
        return number if os.fstat(number).st_dev == device else None
    except OSError:
        return None


def _open_folder() -> int:
    from pyrunc.kernel.mount import open_mount

    return open_mount("tmpfs", (("mode", "700"), ("nr_blocks", "1")))
