"""Namespaces: unshare, setns, and descriptors of them whose kind was checked."""

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
    """unshare(2) with CLONE_NEW… flags; affects the calling thread."""
    syscall("unshare", f"{flags:#x}", flags)


def setns(fd: int, flags: int = 0) -> None:
    """setns(2): a namespace descriptor and its flag (0: any), or a pidfd and a mask of flags."""
    syscall("setns", f"fd {fd} {flags:#x}", fd, flags)


def kind_of(fd: int) -> str:
    """The name of the namespace's kind (`net`, `pid`, …); KernelError EINVAL when the descriptor is
    not a namespace."""
    try:
        if fstatfs_type(fd) == NSFS_MAGIC:
            return _KINDS[fcntl.ioctl(fd, NS_GET_NSTYPE)]
    except (OSError, KeyError):
        pass
    raise KernelError("ioctl", f"NS_GET_NSTYPE of fd {fd}", errno.EINVAL, "not a namespace")


def open_namespace(path: str, kind: str) -> int:
    """A descriptor of the namespace at `path`; EINVAL when it is something else than a namespace of
    that kind."""
    with kernel_errors("open", quoted(path)):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = kind_of(number)
    except KernelError:
        found = "something else"
    if found != kind:
        os.close(number)
        raise KernelError(
            "setns", quoted(path), errno.EINVAL, f"expected a {kind} namespace, found {found}"
        )
    return number


def open_own(kind: str) -> int:
    """A descriptor of the calling thread's namespace of that kind."""
    return open_namespace(f"/proc/thread-self/ns/{kind}", kind)
