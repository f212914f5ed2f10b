"""The disk of the root directory and the tmpfs of the state directory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cri_server.doctor.model import Finding, Host, Level, fine
from cri_server.images.erofs.probe import mount_obstacle, sharing_obstacle
from cri_server.store import file_system
from cri_server.store.paths import Paths
from pyrunc.errors import Error

SPACE_BYTES, INODES = 2 << 30, 20_000
TMPFS = ("tmpfs", "ramfs")


def overlay(host: Host) -> Iterator[Finding]:
    """Mounts an overlay there, writes and hides files; needs root."""
    if os.geteuid():
        return
    root = nearest(host.path(host.config.root))
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=root) as folder:
            paths = Paths(Path(folder), Path(folder))
            file_system.check(paths)
    except (Error, OSError) as error:
        text = str(error).replace(str(root), str(host.config.root))
        yield Finding(
            "overlay-on-root",
            Level.WRONG,
            text,
            "containers have no root: the server does not start",
            "put server.root on ext4 or xfs (made with ftype=1, which mkfs.xfs does), not on an overlay or a network",
        )
    else:
        yield fine("overlay-on-root", f"works on {file_system.described(root)}, with d_type")


def images(host: Host) -> Iterator[Finding]:
    """Mounts an image there, as the server will; needs root."""
    store = host.config.images.store
    if os.geteuid():
        return
    if store == "unpacked":
        yield fine("images", 'unpacked, as [images] store = "unpacked" says')
        return
    follows = "they are unpacked, file by file: pulls take longer, and inodes"
    mend = (
        "boot Linux 6.15 or later; what is here stays usable, and `pyrunc-cri gc` converts it then"
    )
    if store == "auto" and (sharing := sharing_obstacle()):
        yield Finding("images", Level.NOTE, f"if images were mounted, {sharing}", follows, mend)
        return
    try:
        why = mount_obstacle(nearest(host.path(host.config.root)))
    except (Error, OSError) as error:
        why = str(error)
    if not why:
        yield fine("images", "mounted: this kernel has EROFS from files")
    elif store == "erofs":
        follows = 'the server does not start with [images] store = "erofs"'
        mend = 'set [images] store = "auto"'
        yield Finding("images", Level.WRONG, f"images cannot be mounted: {why}", follows, mend)
    else:
        yield Finding("images", Level.NOTE, f"images cannot be mounted: {why}", follows, mend)


def disk(host: Host) -> Iterator[Finding]:
    root = nearest(host.path(host.config.root))
    kind, space = file_system.described(root), os.statvfs(root)
    free, inodes = space.f_bavail * space.f_frsize, space.f_favail
    if space.f_flag & os.ST_RDONLY:
        yield Finding(
            "root-space", Level.WRONG, f"{host.config.root} is on a file system that is read-only", "nothing can be made",
            f"look at dmesg for errors of the disk, then mount -o remount,rw {root}",
        )  # fmt: skip
    elif free < SPACE_BYTES or (space.f_files and inodes < INODES):
        what = f"{free >> 20} MiB" if free < SPACE_BYTES else f"{inodes} inodes"
        yield Finding(
            "root-space",
            Level.WRONG if not free or (space.f_files and not inodes) else Level.WARNING,
            f"only {what} left for {host.config.root}",
            "pulls and starts fail, and kubelet evicts pods",
            "pyrunc-cri gc",
        )
    else:
        yield fine("root-space", f"{free >> 30} GiB left for {host.config.root}")
    if kind == "ext4":
        yield Finding(
            "root-ext4",
            Level.NOTE,
            f"{host.config.root} is on ext4",
            "its allocator avoids inodes that were deleted in the last minutes: where many pods come and go it takes up to 18 % of the CPU of a pod's life, and half of an image's unpacking",
            "for such nodes mkfs.xfs a disk of its own for it",
        )
    if space.f_flag & os.ST_NOEXEC:
        yield Finding(
            "root-noexec",
            Level.WARNING,
            f"{host.config.root} is mounted noexec",
            "CNI plugins of others that execute ours from there (flannel: bridge) fail",
            f"mount -o remount,exec {root}, or put our plugins into {host.config.network.bin_dir}: pyrunc-cri install-node",
        )


def state(host: Host) -> Iterator[Finding]:
    place = nearest(host.path(host.config.state))
    kind = file_system.described(place)
    if kind in TMPFS:
        yield fine("state-tmpfs", f"{host.config.state} is on {kind}")
    else:
        yield Finding(
            "state-tmpfs",
            Level.WARNING,
            f"{host.config.state} is on {kind}, not on a tmpfs",
            "each start of a container waits for the disk, and what belongs to a boot outlives it",
            f"mount -t tmpfs -o mode=0711 pyrunc {host.config.state}, before the server starts",
        )


def programs(host: Host) -> Iterator[Finding]:
    """What the server runs beside its own code."""
    if host.program("nft"):
        yield fine("nft", "nftables' program is there")
    else:
        yield Finding(
            "nft",
            Level.WRONG,
            "there is no program nft",
            "pods reach nothing outside the node (masquerade), and host ports are refused",
            "apt install nftables",
        )


def nearest(path: Path) -> Path:
    """`path`, or the folder above it that is there: where it will be made."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
