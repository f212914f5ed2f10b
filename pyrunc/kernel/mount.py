"""Calls mount(2) and the mount calls by descriptor (fsopen, fsconfig, fsmount, open_tree,
mount_setattr).

A detached mount belongs to its descriptor. It appears nowhere on the host, and ends with the last
copy of the descriptor.
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
from pyrunc.kernel.fd import closing_fd

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
    """Call mount(2)."""
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
    """Call umount2(2)."""
    syscall("umount2", quoted(path), path_bytes(path), flags)


def open_fs(fstype: str) -> int:
    """Begin the configuration of a new file system and return its descriptor: fsopen(2)."""
    return syscall("fsopen", f"'{fstype}'", fstype.encode(), FSOPEN_CLOEXEC)


def fsconfig_flag(fs_fd: int, key: str) -> None:
    """Set an option without a value: fsconfig(FSCONFIG_SET_FLAG)."""
    syscall("fsconfig", f"'{key}'", fs_fd, FSCONFIG_SET_FLAG, key.encode(), None, 0)


def fsconfig_string(fs_fd: int, key: str, value: Path) -> None:
    """Set an option to a string of at most STRING_LIMIT_BYTES: fsconfig(FSCONFIG_SET_STRING)."""
    subject = f"'{key}={os.fsdecode(value)}'"
    syscall("fsconfig", subject, fs_fd, FSCONFIG_SET_STRING, key.encode(), path_bytes(value), 0)


def fsconfig_fd(fs_fd: int, key: str, value_fd: int) -> None:
    """Set a layer of overlayfs by its descriptor: fsconfig(FSCONFIG_SET_FD). Before Linux 6.13 the
    kernel answers EBADF for an O_PATH descriptor."""
    syscall(
        "fsconfig", f"'{key}' = fd {value_fd}", fs_fd, FSCONFIG_SET_FD, key.encode(), None, value_fd
    )


def fsconfig_create(fs_fd: int) -> None:
    """Create the file system: fsconfig(FSCONFIG_CMD_CREATE). Raises KernelError with the file
    system's own log as its note."""
    try:
        syscall("fsconfig", "CMD_CREATE", fs_fd, FSCONFIG_CMD_CREATE, None, None, 0)
    except KernelError as error:
        # The errno alone is EINVAL for nearly everything; file systems explain themselves in this
        # log (errorfc, linux/fs_context.h).
        raise KernelError(error.call, error.subject, error.errno, read_log(fs_fd)) from None


def read_log(fs_fd: int) -> str:
    """Return the messages in the log of a file system's configuration, joined by `; `."""
    lines = []
    while True:
        try:
            # A read returns one message, and fails with ENODATA when there is none left
            # (fscontext_read, fs/fsopen.c).
            lines.append(os.read(fs_fd, 4096).decode("utf-8", "replace").strip())
        except OSError:
            return "; ".join(lines)


def open_fsmount(fs_fd: int, attributes: int = 0) -> int:
    """Mount the created file system and return the detached mount: fsmount(2)."""
    return syscall("fsmount", f"fd {fs_fd}", fs_fd, FSMOUNT_CLOEXEC, attributes)


def open_tree(dir_fd: int, path: Path, flags: int = OPEN_TREE_CLONE) -> int:
    """Call open_tree(2), close-on-exec, and return the descriptor. With OPEN_TREE_CLONE, this is a
    detached clone of the mount. AT_RECURSIVE also clones the mounts below."""
    return syscall("open_tree", quoted(path), dir_fd, path_bytes(path), flags | OPEN_TREE_CLOEXEC)


def move_mount(mount_fd: int, path: Path) -> None:
    """Attach the mount of a descriptor at `path` (move_mount(2)). The descriptor stays valid."""
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
    """Call mount_setattr(2). An empty `path` stands for the mount of `dir_fd` itself."""
    # AT_SYMLINK_NOFOLLOW: over a symbolic link, another mount than the named one would be changed.
    flags = (
        (AT_RECURSIVE if recursive else 0) | (0 if path else AT_EMPTY_PATH) | AT_SYMLINK_NOFOLLOW
    )
    attributes = _MOUNT_ATTR.pack(attr_set, attr_clr, propagation, userns_fd)
    subject = f"{quoted(path)} +{attr_set:#x} -{attr_clr:#x}"
    syscall("mount_setattr", subject, dir_fd, path_bytes(path), flags, attributes, MOUNT_ATTR_SIZE)


def idmap(mount_fd: int, userns_fd: int, *, recursive: bool = False) -> None:
    """Give a detached mount the id map of a user namespace."""
    mount_setattr(mount_fd, attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns_fd, recursive=recursive)


def open_mount(
    fstype: str,
    options: Iterable[tuple[str, str | None]] = (),
    *,
    attributes: int = 0,
    source: str = "",
) -> int:
    """Mount a new file system and return the detached mount: `open_mount("tmpfs", [("mode", "755"),
    ("size", "64k")])`. An option with the value None is a flag."""
    with closing_fd(open_fs(fstype)) as fs_fd:
        if source:
            fsconfig_string(fs_fd, "source", source)
        return _open_with(fs_fd, options, attributes)


def _open_with(fs_fd: int, options: Iterable[tuple[str, str | None]], attributes: int) -> int:
    for key, value in options:
        if value is None:
            fsconfig_flag(fs_fd, key)
        else:
            fsconfig_string(fs_fd, key, value)
    fsconfig_create(fs_fd)
    return open_fsmount(fs_fd, attributes)


def open_proc() -> int:
    """Return a detached mount of a new procfs, without the mounts below our /proc.

    The kernel may refuse a new procfs to root of a user namespace (EPERM). Then the result is a
    recursive clone of /proc, with the mounts below it.
    """
    try:
        return open_mount("proc")
    except KernelError as error:
        # EPERM: a procfs shows our pid namespace, which belongs to the machine's user namespace.
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
    """Mount an overlay and return it detached. `lower`: layers, top first, each a path or a
    descriptor. Without `upper` the overlay is read-only.

    From Linux 6.7 on, each layer is a separate option (`lowerdir+`). Before that, one `lowerdir`
    string joins the paths, and its length is limited. A layer's descriptor needs Linux 6.13, or
    6.15 if it is a detached mount. A path of more than 255 bytes is opened, and overlayfs gets its
    descriptor or the descriptor's path in /proc/self/fd.
    """
    with closing_fd(open_fs("overlay")) as fs_fd:
        fsconfig_string(fs_fd, "source", source)
        _set_lower(fs_fd, lower)
        for key, place in (("upperdir", upper), ("workdir", work)):
            if place is not None:
                _set_folder(fs_fd, key, place)
        return _open_with(fs_fd, options, attributes)


def _set_lower(fs_fd: int, lower: Sequence[Path | int]) -> None:
    for index, layer in enumerate(lower):
        try:
            _set_folder(fs_fd, "lowerdir+", layer)
        except KernelError as error:
            if isinstance(layer, int) and error.errno == errno.EBADF:
                # A mount's descriptor has O_PATH, for which fsconfig(2) answered EBADF before 6.13.
                raise Unsupported(
                    "this kernel cannot id-map the layers of an overlay (Linux 6.13 can)"
                ) from None
            if index or isinstance(layer, int) or error.errno != errno.EINVAL:
                raise
            paths = [os.fsdecode(p) for p in lower if not isinstance(p, int)]
            escaped = (p.replace("\\", "\\\\").replace(":", "\\:") for p in paths)
            fsconfig_string(fs_fd, "lowerdir", ":".join(escaped))
            return


def _set_folder(fs_fd: int, key: str, place: Path | int) -> None:
    """Set the option `key` of overlayfs (`lowerdir+`, `upperdir` or `workdir`) to a folder, by its
    path or a descriptor. A backslash is an escape in `upperdir` and `workdir` (ovl_mount_dir), but
    not in `lowerdir+`."""
    if isinstance(place, int):
        fsconfig_fd(fs_fd, key, place)
        return
    path = path_bytes(place)
    text = path if key == "lowerdir+" else path.replace(b"\\", b"\\\\")
    if len(text) <= STRING_LIMIT_BYTES:
        fsconfig_string(fs_fd, key, text)
        return
    # Without OPEN_TREE_CLONE this is an O_PATH descriptor of the folder, not a mount.
    with closing_fd(open_tree(AT_FDCWD, path, 0)) as folder:
        try:
            fsconfig_fd(fs_fd, key, folder)
        except KernelError as error:
            if error.errno != errno.EBADF:
                raise
            # looked up at once (ovl_mount_dir)
            fsconfig_string(fs_fd, key, b"/proc/self/fd/%d" % folder)


def open_read_only_clone(path: Path, dir_fd: int = AT_FDCWD, *, propagation: int = 0) -> int:
    """Return a detached, read-only bind mount of a file or directory, as an O_PATH descriptor.

    - `path`: empty for the file of the descriptor `dir_fd`
    - `propagation`: MS_PRIVATE, or 0 to leave the mount propagation unchanged
    """
    flags = OPEN_TREE_CLONE | (0 if dir_fd == AT_FDCWD else AT_EMPTY_PATH)
    tree = open_tree(dir_fd, path, flags)
    try:
        mount_setattr(tree, attr_set=MOUNT_ATTR_RDONLY, propagation=propagation)
    except BaseException:
        os.close(tree)
        raise
    return tree


def fstatfs_type(fd: int) -> int:
    """Return f_type of fstatfs(2)."""
    result = buffer(120)
    syscall("fstatfs", f"fd {fd}", fd, result)
    kind: int = _STATFS_TYPE.unpack_from(result)[0]
    return kind & 0xFFFFFFFF
