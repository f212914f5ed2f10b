"""Checks at the server's start that the root and state directories can hold pods: binds a socket
and mounts an overlay, as the first pod would.

The state directory must hold a socket. The root directory must hold an overlay's upper layer, with
whiteouts and opaque directories. It cannot do so if it is on another overlay or on a file system
without xattrs. The file system must also report the type of directory entries (d_type). Without
d_type overlayfs can be mounted, but shows deleted files (overlayfs.rst, "upper fs needs to support
d_type").

nodev, nosuid and noexec do no harm, because each overlay is a separate mount with its own flags.
The one effect of noexec is that the CNI plugins in the root directory cannot be executed.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path
from struct import Struct

from cri_server.store.paths import Paths
from pyrunc.compile.image_mount import open_layers
from pyrunc.errors import KernelError, ResourceExhausted, Unsupported, WrongState
from pyrunc.kernel.call import buffer, syscall
from pyrunc.kernel.fd import closing_fd, read_file, short_path
from pyrunc.kernel.full import FULL, disk_error, disk_errors, reason
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)

PROBE = "probe"
DT_UNKNOWN = 0
_DIRENT64 = Struct("=QqHB")  # d_ino, d_off, d_reclen, d_type; getdents64(2)


def check(paths: Paths) -> None:
    """Check that the root and state directories can hold pods. Raises WrongState, Unsupported,
    KernelError or ResourceExhausted with the directory and the reason.

    A full root directory is only logged, because kubelet frees space through this server.
    """
    for folder in (paths.root, paths.state):
        _check_owner(folder)
    _check_state(paths.state)
    try:
        _check_root(paths.root)
    except ResourceExhausted as error:
        log.warning("%s", error)
    if os.statvfs(paths.root).f_flag & os.ST_NOEXEC:
        log.warning(
            "%s is mounted noexec: this project's CNI plugins cannot be executed there", paths.root
        )


def _check_owner(folder: Path) -> None:
    """Raise WrongState unless the server's user owns the folder. Another owner could replace it, or
    open it to other users."""
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise WrongState(
            f"{folder} belongs to user {status.st_uid},"
            f" not to user {os.geteuid()}, who runs the server"
        )


def _check_state(state: Path) -> None:
    probe = state / PROBE
    with disk_errors("bind a socket in", str(state)):
        remove_path(probe)
        probe.mkdir(mode=0o700)
        with (
            short_path(probe) as path,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        ):
            listener.bind(f"{path}/sock")
        remove_path(probe)


def _check_root(root: Path) -> None:
    probe = root / PROBE
    try:
        remove_path(probe)
        for name in ("", "lower", "lower/folder", "lower/folder/below", "upper", "work"):
            (probe / name).mkdir(mode=0o700)
        (probe / "lower" / "file").touch()
        _check_types(root, probe / "lower")
        _check_overlay(root, probe)
    except OSError as error:
        raise disk_error(error, "write", str(probe)) from None
    finally:
        _clear(probe)


def _clear(probe: Path) -> None:
    try:
        remove_path(probe)
    except OSError as error:
        log.warning("%s", disk_error(error, "rmdir", str(probe)))


def _check_types(root: Path, folder: Path) -> None:
    with closing_fd(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        entries = buffer(4096)
        length, offset = syscall("getdents64", str(folder), descriptor, entries, len(entries)), 0
    while offset < length:
        _, _, size, kind = _DIRENT64.unpack_from(entries, offset)
        if kind == DT_UNKNOWN:
            raise Unsupported(
                f"{root} is on {file_system_type(root)} without d_type"
                " (ext4's feature filetype, xfs' ftype=1), which overlayfs needs"
            )
        offset += size


def _check_overlay(root: Path, probe: Path) -> None:
    try:
        # Without volatile (Linux 5.10) the unmount would sync the whole file system of the upper
        # layer.
        mount = open_layers(
            [str(probe / "lower")], str(probe / "upper"), str(probe / "work"), (("volatile", None),)
        )
    except KernelError as error:
        if error.errno in FULL:
            raise ResourceExhausted(reason(error.errno, str(root))) from None
        raise Unsupported(
            f"{root} is on {file_system_type(root)}, where overlayfs cannot write a layer: {error}"
        ) from None
    try:
        # The first removal makes a whiteout; the folder that replaces a removed one is marked with
        # the attribute trusted.overlay.opaque.
        os.unlink("file", dir_fd=mount)
        os.rmdir("folder/below", dir_fd=mount)
        os.rmdir("folder", dir_fd=mount)
        os.mkdir("folder", dir_fd=mount)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with closing_fd(os.open("folder", flags, dir_fd=mount)) as folder:
            if os.listdir(folder):
                raise OSError(errno.EIO, "a replaced folder shows its old content")
    except OSError as error:
        if error.errno in FULL:
            raise
        what = error.strerror or str(error)
        raise Unsupported(
            f"{root} is on {file_system_type(root)}, where overlayfs cannot hide a file: {what}"
        ) from None
    finally:
        os.close(mount)


def file_system_type(path: Path) -> str:
    """Return the type of the file system that contains `path`, from mountinfo."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # Lines end only with \n: a mount point may contain \r.
    for line in os.fsdecode(read_file("/proc/self/mountinfo")).split("\n")[:-1]:
        before, _, after = line.partition(" - ")
        # btrfs shows another device number in stat(2) than in mountinfo, for each subvolume.
        if before.split(" ")[2] == number:
            return after.split(" ")[0]
    return "a file system"
