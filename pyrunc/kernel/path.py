"""Opens paths beneath a root directory's descriptor. The kernel resolves them (openat2(2)); paths
are never joined as strings.

The content of the root is hostile and may change at any time. `open_in_root` treats the root as a
chroot does: absolute symbolic links and `..` stay inside. `open_beneath` refuses paths that lead
out. Both refuse magic links, such as /proc/self/exe (CVE-2019-5736).
"""

from __future__ import annotations

import errno
import os
from struct import pack

from pyrunc.abi.file import (
    O_CLOEXEC,
    O_PATH,
    O_RDONLY,
    OPEN_HOW_SIZE,
    RESOLVE_BENEATH,
    RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    S_IFLNK,
    S_IFMT,
    S_IFREG,
)
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.call import path_bytes, quoted, raw
from pyrunc.kernel.fd import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    Path = str | bytes | os.PathLike[str]

RETRIES = 100
"""How often `openat2` repeats a call. RESOLVE_IN_ROOT with `..` answers EAGAIN when anything on the
machine is renamed or mounted meanwhile (3 to 6 % of calls under load)."""
LINKS_AT_MOST = 40  # as the kernel's MAXSYMLINKS


def openat2(dir_fd: int, path: Path, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """Call openat2(2), close-on-exec. Repeats the call after EAGAIN or EINTR, at most RETRIES
    times. Raises KernelError."""
    raw_path = path_bytes(path)
    how = pack("<3Q", flags | O_CLOEXEC, mode, resolve)
    # Limited, because a container can rename without end and so keep the call from ever succeeding.
    for _ in range(RETRIES):
        result = raw("openat2", dir_fd, raw_path, how, OPEN_HOW_SIZE)
        if result not in (-errno.EAGAIN, -errno.EINTR):
            break
    if result < 0:
        raise KernelError("openat2", quoted(path), -result)
    return result


def open_in_root(root_fd: int, path: Path, flags: int = O_PATH) -> int:
    """Open `path` as a process in a chroot at `root_fd` would. Magic links are refused. Raises
    KernelError."""
    return openat2(root_fd, path, flags, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)


def open_beneath(
    root_fd: int, path: Path, flags: int = O_PATH, mode: int = 0, *, links: bool = False
) -> int:
    """Open `path` beneath `root_fd`. Raises KernelError: EXDEV if the path leads out, ELOOP if
    it contains a symbolic link and `links` is False."""
    resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | (0 if links else RESOLVE_NO_SYMLINKS)
    return openat2(root_fd, path, flags, mode, resolve)


def open_folder_at(dir_fd: int, name: str) -> int:
    """Open the folder `name` in the folder `dir_fd` as an O_PATH descriptor. A missing folder is
    created with mode 0755. Raises OSError, also when `name` is a symbolic link."""
    flags = O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, 0o755, dir_fd=dir_fd)
    except FileExistsError:
        pass
    # Again with O_NOFOLLOW: another process may have put a symbolic link there meanwhile (similar
    # to CVE-2024-45310).
    return os.open(name, flags, dir_fd=dir_fd)


def clean(path: str) -> str:
    """Return `path` as an absolute path without `.`, `..` and double slashes: `a/./b/../c//` is
    `/a/c`, and `/..` is `/`. Does not look at the file system."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def components(path: str) -> list[str]:
    """Return the names in the cleaned path: `/a/../b/c` is `["b", "c"]`, `/` is `[]`."""
    return [part for part in clean(path).split("/") if part]


def resolve(root_fd: int, path: str) -> str:
    """Resolve all symbolic links of `path` inside the root; the path need not exist. Returns an
    absolute path without links. Raises KernelError, with ELOOP after 40 links.

    Links may change afterwards, so a later open of the path must resolve it beneath the root again.
    """
    pending = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if done:
                done.pop()
            continue
        target = _link_target(root_fd, "/".join([*done, name]))
        if target is None:
            done.append(name)
            continue
        links += 1
        if links > LINKS_AT_MOST:
            raise KernelError("openat2", quoted(path), errno.ELOOP)
        if target.startswith("/"):
            done.clear()
        pending.extend(target.split("/")[::-1])
    return "/" + "/".join(done)


def _link_target(root_fd: int, path: str) -> str | None:
    """Return the target of the symbolic link at `path`; None if there is no symbolic link."""
    try:
        number = open_in_root(root_fd, path, O_PATH | os.O_NOFOLLOW)
    except KernelError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    with closing_fd(number):
        is_link = os.fstat(number).st_mode & S_IFMT == S_IFLNK
        return readlinkat(number, "") if is_link else None


def open_regular_in_root(root_fd: int, path: str) -> int:
    """Open a regular file inside the root for reading. Raises KernelError, with EINVAL for any
    other kind of file.

    The kind is checked on an O_PATH descriptor first, because an open has effects: a device in an
    image may be the machine's watchdog, a pipe may block.
    """
    with closing_fd(open_in_root(root_fd, path)) as place:
        return _reopen_regular(place, path)


def _reopen_regular(place: int, path: str) -> int:
    with kernel_errors("open", quoted(path)):
        if os.fstat(place).st_mode & S_IFMT != S_IFREG:
            raise KernelError("open", quoted(path), errno.EINVAL, "not a regular file")
        # Through procfs this opens the checked file; its name may lead to another file by now.
        return os.open(f"/proc/self/fd/{place}", O_RDONLY | O_CLOEXEC | os.O_NOCTTY)


def open_regular_at(dir_fd: int, name: str | bytes, flags: int = O_RDONLY) -> int:
    """Open the regular file `name` in a folder that others may change. Raises OSError, with ESTALE
    if `name` is not a regular file. Links and devices are not opened, because opening them may have
    effects."""
    with closing_fd(os.open(name, O_PATH | os.O_NOFOLLOW | O_CLOEXEC, dir_fd=dir_fd)) as place:
        if os.fstat(place).st_mode & S_IFMT != S_IFREG:
            raise OSError(errno.ESTALE, "not a regular file any more", name)
        return os.open(f"/proc/self/fd/{place}", flags | O_CLOEXEC)


def read_in_root(root_fd: int, path: str, limit_bytes: int = 1 << 20) -> bytes:
    """Return the content of a regular file inside the root. Raises KernelError: EFBIG for more than
    `limit_bytes`, EINVAL when it is not a regular file."""
    with closing_fd(open_in_root(root_fd, path)) as place:
        return read_regular(place, path, limit_bytes)


def read_regular(place: int, path: str, limit_bytes: int = 1 << 20) -> bytes:
    """Return the content of the regular file to which the O_PATH descriptor `place` refers. `path`:
    the file's name in errors. Raises the errors of `read_in_root`."""
    with open(_reopen_regular(place, path), "rb", buffering=0) as file:
        content = b""
        # Not by the size of fstat(2): the file may be on a volume, and grow while it is read.
        while part := file.read(limit_bytes + 1 - len(content)):
            content += part
            if len(content) > limit_bytes:
                raise KernelError("read", quoted(path), errno.EFBIG)
        return content


def readlinkat(dir_fd: int, name: Path) -> str:
    """Return the target of a symbolic link: readlinkat(2). With an empty `name`, `dir_fd` is an
    O_PATH descriptor of the link."""
    with kernel_errors("readlinkat", quoted(name)):
        return os.fsdecode(os.readlink(path_bytes(name), dir_fd=dir_fd))
