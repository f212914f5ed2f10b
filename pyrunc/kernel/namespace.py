"""Enters, makes and opens namespaces; checks the kind of an opened namespace."""

from __future__ import annotations

import errno
import fcntl
import os

from pyrunc.abi.clone import NAMESPACES
from pyrunc.abi.ioctl import NS_GET_NSTYPE
from pyrunc.abi.mount import NSFS_MAGIC
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.call import quoted, syscall
from pyrunc.kernel.mount import fstatfs_type

_KINDS = {flag: kind for kind, flag in NAMESPACES.items()}


def unshare(flags: int) -> None:
    """Move the calling thread to new namespaces: unshare(2) with CLONE_NEW… flags."""
    syscall("unshare", f"{flags:#x}", flags)


def setns(fd: int, flags: int = 0) -> None:
    """Call setns(2). `fd`, `flags`: a namespace and its flag (0: any kind), or a pidfd and a mask
    of flags."""
    syscall("setns", f"fd {fd} {flags:#x}", fd, flags)


def kind_of(fd: int) -> str:
    """Return the kind (`net`, `pid`, …) of the namespace that the descriptor refers to. Raises
    KernelError, with EINVAL when it refers to no namespace."""
    try:
        # Checked before the ioctl, whose number can mean something else to the driver of a device.
        if fstatfs_type(fd) == NSFS_MAGIC:
            return _KINDS[fcntl.ioctl(fd, NS_GET_NSTYPE)]
    except (OSError, KeyError):
        pass
    raise KernelError("ioctl", f"NS_GET_NSTYPE of fd {fd}", errno.EINVAL, "not a namespace")


def open_namespace(path: str, kind: str) -> int:
    """Open the namespace at `path`. Raises KernelError, with EINVAL when it is no namespace of the
    kind `kind`."""
    with kernel_errors("open", quoted(path)):
        # The configuration chooses the path: a FIFO must not block the open, and a terminal must
        # not become our controlling terminal.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        actual = kind_of(number)
    except KernelError:
        actual = "something else"
    if actual != kind:
        os.close(number)
        raise KernelError(
            "setns", quoted(path), errno.EINVAL, f"expected a {kind} namespace, found {actual}"
        )
    return number


def open_own(kind: str) -> int:
    """Open the calling thread's namespace of the kind `kind`."""
    # /proc/self shows the main thread's, and a thread that has called unshare(2) has its own.
    return open_namespace(f"/proc/thread-self/ns/{kind}", kind)
