"""Network namespaces: open one by path, be inside it for a while, write its sysctls.

A path may be `/proc/<pid>/fd/<n>`, `/proc/<pid>/ns/net` or a bind mount; what it leads to is
checked to be a network namespace before anything else is done with it. Entering changes the calling
thread; plugins have only one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from cni_plugins.protocol.errors import UNKNOWN_CONTAINER, CniError
from pyrunc.kernel.call import syscall

CLONE_NEWNET = 0x40000000
_NS_GET_NSTYPE = 0xB703
_OWN = "/proc/thread-self/ns/net"
_GONE = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR)
_home: int | None = None


def open_netns(path: str) -> int:
    """A descriptor of the namespace at `path`. Raises CniError 3 where there is none, or something
    else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise CniError(UNKNOWN_CONTAINER, f"network namespace {path}: {error.strerror}") from None
    try:
        kind = fcntl.ioctl(descriptor, _NS_GET_NSTYPE)
    except OSError:
        kind = 0
    if kind != CLONE_NEWNET:
        os.close(descriptor)
        raise CniError(UNKNOWN_CONTAINER, f"{path} is not a network namespace")
    return descriptor


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """`open_netns` for a block."""
    descriptor = open_netns(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def exists(path: str) -> bool:
    """Whether `path` leads to a network namespace."""
    try:
        os.close(open_netns(path))
    except CniError:
        return False
    return True


def identity() -> tuple[int, int]:
    """Device and inode of the namespace that the thread is in."""
    found = os.stat(_OWN)
    return found.st_dev, found.st_ino


def keep_open() -> None:
    """Remember the present namespace as the one that `inside` comes from; for processes that serve
    many requests."""
    global _home
    _home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def inside(descriptor: int) -> Iterator[None]:
    """Be in the namespace for a block; sockets made there stay in it."""
    own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC) if _home is None else _home
    try:
        syscall("setns", "network namespace", descriptor, CLONE_NEWNET)
        try:
            yield
        finally:
            syscall("setns", "own network namespace", own, CLONE_NEWNET)
    finally:
        if own != _home:
            os.close(own)


def write_sysctl(name: str, value: str) -> bool:
    """Set `name`, such as `net/ipv4/ip_forward`, in the present namespace unless it has the value
    already.

    Returns False where the kernel has no such setting (IPv6 switched off). Raises OSError.
    """
    path = f"/proc/sys/{name}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    try:
        if os.read(descriptor, 256).strip() != value.encode():
            os.pwrite(descriptor, value.encode(), 0)
    finally:
        os.close(descriptor)
    return True
