"""Mounts: the classic call, and the ones by descriptor (fsopen, fsconfig, fsmount, open_tree,
mount_setattr).

A mount that these make detached belongs to its descriptor: nothing appears on the host, and it is
gone with the last one.
"""

from __future__ import annotations

import errno
import os
from struct import Struct

from pyrunc.abi.file import AT_EMPTY_PATH, AT_FDCWD, AT_RECURSIVE, AT_SYMLINK_NOFOLLOW
from pyrunc.abi.mount import (
    FSCONFIG_CMD_CREATE,
    FSCONFIG_SET_FD,
    FSCONFIG_SET_FLAG,
    FSCONFIG_SET_STRING,
    FSMOUNT_CLOEXEC,
    FSOPEN_CLOEXEC,
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_RDONLY,
    MOUNT_ATTR_SIZE,
    MOVE_MOUNT_F_EMPTY_PATH,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
)
from pyrunc.errors import KernelError, Unsupported
from pyrunc.kernel.call import buffer, path_bytes, quoted, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Path = str | bytes | os.PathLike[str]

_MOUNT_ATTR = Struct("<4Q")
_STATFS_TYPE = Struct("@l")
Options = tuple[tuple[str, str | None], ...]  # a flag has no value
STRING_LIMIT_BYTES = 255  # of a value, fsconfig(2)


def mount(
    source: Path | None, target: Path, fstype: str | None, flags: int = 0, data: str | None = None
) -> None:
    """mount(2)."""
    syscall(
        "mount",
        f"{quoted(source) if source is not None else fstype or ''} on {quoted(target)}",
        path_bytes(source) if source is not None else None,
        path_bytes(target),
        fstype.encode() if fstype is not None else None,
        flags,
        data.encode() if data is not None else None,
    )


def umount2(path: Path, flags: int = 0) -> None:
    """umount2(2)."""
    syscall("umount2", quoted(path), path_bytes(path), flags)


def open_fs(fstype: str) -> int:
    """fsopen(2): the configuration of a file system that is to be made."""
    return syscall("fsopen", f"'{fstype}'", fstype.encode(), FSOPEN_CLOEXEC)


def fsconfig_flag(fs_fd: int, key: str) -> None:
    """fsconfig(FSCONFIG_SET_FLAG)."""
    syscall("fsconfig", f"'{key}'", fs_fd, FSCONFIG_SET_FLAG, key.encode(), None, 0)


def fsconfig_string(fs_fd: int, key: str, value: Path) -> None:
    """fsconfig(FSCONFIG_SET_STRING); at most STRING_LIMIT_BYTES of value."""
    subject = f"'{key}={os.fsdecode(value)}'"
    syscall("fsconfig", subject, fs_fd, FSCONFIG_SET_STRING, key.encode(), path_bytes(value), 0)


def fsconfig_fd(fs_fd: int, key: str, value_fd: int) -> None:
    """fsconfig(FSCONFIG_SET_FD): a layer of overlayfs as a descriptor (kernels since 6.13, else
    EINVAL)."""
    syscall(
        "fsconfig", f"'{key}' = fd {value_fd}", fs_fd, FSCONFIG_SET_FD, key.encode(), None, value_fd
    )


def fsconfig_create(fs_fd: int) -> None:
    """fsconfig(FSCONFIG_CMD_CREATE). The error's note is what the file system wrote to its log."""
    try:
        syscall("fsconfig", "CMD_CREATE", fs_fd, FSCONFIG_CMD_CREATE, None, None, 0)
    except KernelError as error:
        raise KernelError(error.call, error.subject, error.errno, read_log(fs_fd)) from None


def read_log(fs_fd: int) -> str:
    """The messages that a file system configuration holds for us, joined by `; `."""
    lines = []
    while True:
        try:
            lines.append(os.read(fs_fd, 4096).decode("utf-8", "replace").strip())
        except OSError:
            return "; ".join(lines)


def open_fsmount(fs_fd: int, attributes: int = 0) -> int:
    """fsmount(2): a detached mount of the file system that was created."""
    return syscall("fsmount", f"fd {fs_fd}", fs_fd, FSMOUNT_CLOEXEC, attributes)


def open_tree(dir_fd: int, path: Path, flags: int = OPEN_TREE_CLONE) -> int:
    """open_tree(2), close-on-exec: with OPEN_TREE_CLONE a detached copy of a mount, AT_RECURSIVE
    with those below it."""
    return syscall("open_tree", quoted(path), dir_fd, path_bytes(path), flags | OPEN_TREE_CLOEXEC)


def move_mount(mount_fd: int, path: Path) -> None:
    """move_mount(2): attach the mount behind a descriptor at `path`; it stays the descriptor's too."""
    subject = f"fd {mount_fd} on {quoted(path)}"
    syscall(
        "move_mount", subject, mount_fd, b"", AT_FDCWD, path_bytes(path), MOVE_MOUNT_F_EMPTY_PATH
    )


def mount_setattr(
    dir_fd: int,
    path: Path = "",
    *,
    attr_set: int = 0,
    attr_clr: int = 0,
    propagation: int = 0,
    userns_fd: int = 0,
    recursive: bool = False,
) -> None:
    """mount_setattr(2); an empty path is the descriptor itself."""
    flags = (
        (AT_RECURSIVE if recursive else 0) | (0 if path else AT_EMPTY_PATH) | AT_SYMLINK_NOFOLLOW
    )
    attributes = _MOUNT_ATTR.pack(attr_set, attr_clr, propagation, userns_fd)
    subject = f"{quoted(path)} +{attr_set:#x} -{attr_clr:#x}"
    syscall("mount_setattr", subject, dir_fd, path_bytes(path), flags, attributes, MOUNT_ATTR_SIZE)


def idmap(mount_fd: int, userns_fd: int, *, recursive: bool = False) -> None:
    """Gives a detached mount the id map of a user namespace."""
    mount_setattr(mount_fd, attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns_fd, recursive=recursive)


def open_mount(
    fstype: str,
    options: Iterable[tuple[str, str | None]] = (),
    *,
    attributes: int = 0,
    source: str = "",
) -> int:
    """A detached mount of a new file system: `open_mount("tmpfs", [("mode", "755"), ("size",
    "64k")])`."""
    fs_fd = open_fs(fstype)
    try:
        if source:
            fsconfig_string(fs_fd, "source", source)
        return _open_with(fs_fd, options, attributes)
    finally:
        os.close(fs_fd)


def _open_with(fs_fd: int, options: Iterable[tuple[str, str | None]], attributes: int) -> int:
    for key, value in options:
        if value is None:
            fsconfig_flag(fs_fd, key)
        else:
            fsconfig_string(fs_fd, key, value)
    fsconfig_create(fs_fd)
    return open_fsmount(fs_fd, attributes)


def open_proc() -> int:
    """A procfs that nobody has mounted anything into, detached. Root of a user namespace only gets
    a clone of /proc."""
    try:
        return open_mount("proc")
    except KernelError as error:  # it belongs to the pid namespace, and that to the machine's root
        if error.errno != errno.EPERM:
            raise
        return open_tree(AT_FDCWD, "/proc", OPEN_TREE_CLONE | AT_RECURSIVE)


def open_overlay(
    lower: Sequence[Path | int],
    upper: Path | int | None = None,
    work: Path | int | None = None,
    *,
    options: Iterable[tuple[str, str | None]] = (),
    attributes: int = 0,
    source: str = "overlay",
) -> int:
    """A detached overlay mount; layers top first, each a path or a descriptor. Without `upper` it
    is read-only.

    `lowerdir+` takes one layer at a time (Linux 6.7) and has no limit on the whole; where it is
    missing, one `lowerdir` string joins the paths. A descriptor needs Linux 6.13, one of a detached
    mount 6.15; a path of more than 255 bytes goes as a descriptor, or by its name in procfs.
    """
    fs_fd = open_fs("overlay")
    try:
        fsconfig_string(fs_fd, "source", source)
        _set_lower(fs_fd, lower)
        for key, place in (("upperdir", upper), ("workdir", work)):
            if place is not None:
                _set_folder(fs_fd, key, place)
        return _open_with(fs_fd, options, attributes)
    finally:
        os.close(fs_fd)


def _set_lower(fs_fd: int, lower: Sequence[Path | int]) -> None:
    for index, layer in enumerate(lower):
        try:
            _set_folder(fs_fd, "lowerdir+", layer)
        except KernelError as error:
            if isinstance(layer, int) and error.errno == errno.EBADF:
                raise Unsupported(
                    "this kernel takes no mapped layers of an overlay (Linux 6.13 does)"
                ) from None
            if index or isinstance(layer, int) or error.errno != errno.EINVAL:
                raise
            paths = [os.fsdecode(p) for p in lower if not isinstance(p, int)]
            escaped = (p.replace("\\", "\\\\").replace(":", "\\:") for p in paths)
            fsconfig_string(fs_fd, "lowerdir", ":".join(escaped))
            return


def _set_folder(fs_fd: int, key: str, place: Path | int) -> None:
    """`upperdir` and `workdir` are read with the backslash as an escape (ovl_mount_dir),
    `lowerdir+` is not."""
    if isinstance(place, int):
        fsconfig_fd(fs_fd, key, place)
        return
    path = path_bytes(place)
    text = path if key == "lowerdir+" else path.replace(b"\\", b"\\\\")
    if len(text) <= STRING_LIMIT_BYTES:
        fsconfig_string(fs_fd, key, text)
        return
    folder = open_tree(AT_FDCWD, path, 0)
    try:
        fsconfig_fd(fs_fd, key, folder)
    except KernelError as error:
        if error.errno != errno.EBADF:
            raise
        # looked up at once (ovl_mount_dir)
        fsconfig_string(fs_fd, key, b"/proc/self/fd/%d" % folder)
    finally:
        os.close(folder)


def open_read_only_clone(path: Path, dir_fd: int = AT_FDCWD, *, propagation: int = 0) -> int:
    """An O_PATH descriptor of a detached read-only mount of one file or directory; an empty path
    below a descriptor is the descriptor itself. `propagation`: MS_PRIVATE, or 0 to leave it."""
    flags = OPEN_TREE_CLONE | (0 if dir_fd == AT_FDCWD else AT_EMPTY_PATH)
    tree = open_tree(dir_fd, path, flags)
    try:
        mount_setattr(tree, attr_set=MOUNT_ATTR_RDONLY, propagation=propagation)
    except BaseException:
        os.close(tree)
        raise
    return tree


def fstatfs_type(fd: int) -> int:
    """f_type of fstatfs(2)."""
    result = buffer(120)
    syscall("fstatfs", f"fd {fd}", fd, result)
    return _first_long(result)


def _first_long(content: bytes | bytearray) -> int:
    value: int = _STATFS_TYPE.unpack_from(content)[0]
    return value & 0xFFFFFFFF
