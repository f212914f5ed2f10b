"""Opens and enters network namespaces, and writes their sysctls.

A namespace's path may be `/proc/<pid>/fd/<n>`, `/proc/<pid>/ns/net` or a bind mount. Entering a
namespace moves only the calling thread; plugins have a single thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from cni_plugins.protocol.errors import UNKNOWN_CONTAINER, CniError
from pyrunc.kernel.call import syscall
from pyrunc.kernel.fd import closing_fd

CLONE_NEWNET = 0x40000000
_NS_GET_NSTYPE = 0xB703
_OWN = "/proc/thread-self/ns/net"
_GONE = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR)
_kept_netns: int | None = None


def open_netns(path: str) -> int:
    """Open the network namespace at `path` and return the descriptor. Raises CniError
    UNKNOWN_CONTAINER if `path` cannot be opened or is no network namespace."""
    try:
        # The path comes from the caller: open(2) of a FIFO would wait for a writer, and a terminal
        # could become the controlling one.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise CniError(
            UNKNOWN_CONTAINER, f"cannot open network namespace {path}: {error.strerror}"
        ) from None
    try:
        # ioctl_ns(2), Linux 4.11. Any other file answers ENOTTY, before ADD has changed anything.
        kind = fcntl.ioctl(descriptor, _NS_GET_NSTYPE)
    except OSError:
        kind = 0
    if kind != CLONE_NEWNET:
        os.close(descriptor)
        raise CniError(UNKNOWN_CONTAINER, f"{path} is not a network namespace")
    return descriptor


def exists(path: str) -> bool:
    """Return whether `path` leads to a network namespace."""
    try:
        os.close(open_netns(path))
    except CniError:
        return False
    return True


def current_id() -> tuple[int, int]:
    """Return device and inode of the calling thread's network namespace, which identify it."""
    netns_stat = os.stat(_OWN)
    return netns_stat.st_dev, netns_stat.st_ino


def keep_open() -> None:
    """Open the current namespace once, so that `entered` returns to it without opening it each
    time. A process that serves many requests calls this."""
    global _kept_netns
    _kept_netns = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def entered(descriptor: int) -> Iterator[None]:
    """Run the `with` block in the network namespace of `descriptor`. A socket that the block opens
    stays in that namespace."""
    # /proc/self would be the first thread's namespace: setns(2) moves only the calling thread.
    own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC) if _kept_netns is None else _kept_netns
    try:
        syscall("setns", "network namespace", descriptor, CLONE_NEWNET)
        try:
            yield
        finally:
            syscall("setns", "own network namespace", own, CLONE_NEWNET)
    finally:
        if own != _kept_netns:
            os.close(own)


def write_sysctl(name: str, value: str) -> bool:
    """Set the sysctl `name`, such as `net/ipv4/ip_forward`, in the current namespace. Does not
    write a value that is set already.

    Returns False if the kernel has no such sysctl, for example because IPv6 is disabled. Raises
    OSError.
    """
    # /proc/sys/net shows the namespace of the thread that opens the file.
    path = f"/proc/sys/{name}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    with closing_fd(descriptor):
        if os.read(descriptor, 256).strip() != value.encode():
            os.pwrite(descriptor, value.encode(), 0)
    return True
