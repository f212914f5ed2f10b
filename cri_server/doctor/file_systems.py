"""Checks of the root directory's disk and of the state directory's tmpfs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cri_server.doctor.model import CheckResult, Level, Machine, fine, note, warning, wrong
from cri_server.images.erofs.probe import mount_obstacle, sharing_obstacle
from cri_server.store import file_system
from cri_server.store.paths import Paths
from pyrunc.errors import Error

SPACE_BYTES, INODES = 2 << 30, 20_000
TMPFS = ("tmpfs", "ramfs")


def overlay(host: Machine) -> Iterator[CheckResult]:
    """Check that containers' root file systems can be mounted below `server.root`: mount an overlay
    there, and delete files of its lower layer. Needs root."""
    if os.geteuid():
        return
    root = nearest(host.path(host.config.root))
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=root) as folder:
            paths = Paths(Path(folder), Path(folder))
            file_system.check(paths)
    except (Error, OSError) as error:
        text = str(error).replace(str(root), str(host.config.root))
        yield wrong(
            "overlay-on-root",
            text,
            "containers cannot have a root file system: the server does not start",
            "put server.root on ext4 or xfs (with ftype=1, the default of mkfs.xfs), not on an"
            " overlay or a network file system",
        )
    else:
        yield fine("overlay-on-root", f"works on {file_system.file_system_type(root)}, with d_type")


def images(host: Machine) -> Iterator[CheckResult]:
    """Check whether the server can mount images, by mounting one below `server.root`. Needs
    root."""
    store = host.config.images.store
    if os.geteuid():
        return
    if store == "unpacked":
        yield fine("images", 'unpacked, because of [images] store = "unpacked"')
        return
    effect = "images are unpacked file by file: pulls take longer and use more inodes"
    remedy = (
        "boot Linux 6.15 or later; existing images stay usable, and `pyrunc-cri gc` converts them"
    )
    if store == "auto" and (sharing := sharing_obstacle()):
        yield note("images", f"if images were mounted, {sharing}", effect, remedy)
        return
    try:
        why = mount_obstacle(nearest(host.path(host.config.root)))
    except (Error, OSError) as error:
        why = str(error)
    if not why:
        yield fine("images", "mounted: this kernel can mount EROFS from files")
    elif store == "erofs":
        effect = 'the server does not start with [images] store = "erofs"'
        remedy = 'set [images] store = "auto"'
        yield wrong("images", f"images cannot be mounted: {why}", effect, remedy)
    else:
        yield note("images", f"images cannot be mounted: {why}", effect, remedy)


def disk(host: Machine) -> Iterator[CheckResult]:
    """Check the space and the mount options of the root directory."""
    root = nearest(host.path(host.config.root))
    kind, space = file_system.file_system_type(root), os.statvfs(root)
    free, inodes = space.f_bavail * space.f_frsize, space.f_favail
    if space.f_flag & os.ST_RDONLY:
        yield wrong(
            "root-space",
            f"the file system of {host.config.root} is read-only",
            "no pod can be created and no image pulled",
            f"look for disk errors in dmesg, then mount -o remount,rw {root}",
        )
    # btrfs has no fixed number of inodes and reports 0 (statfs(2)).
    elif free < SPACE_BYTES or (space.f_files and inodes < INODES):
        what = f"{free >> 20} MiB" if free < SPACE_BYTES else f"{inodes} inodes"
        yield CheckResult(
            "root-space",
            Level.WRONG if not free or (space.f_files and not inodes) else Level.WARNING,
            f"only {what} left for {host.config.root}",
            "pulls and starts fail, and kubelet evicts pods",
            "pyrunc-cri gc",
        )
    else:
        yield fine("root-space", f"{free >> 30} GiB left for {host.config.root}")
    if kind == "ext4":
        yield note(
            "root-ext4",
            f"{host.config.root} is on ext4",
            "the allocator of ext4 avoids recently deleted inodes: on nodes where many pods come"
            " and go the search takes up to 18 % of a pod's CPU time, and half of the time of"
            " unpacking an image",
            f"on such nodes put {host.config.root} on its own disk with xfs (mkfs.xfs)",
        )
    if space.f_flag & os.ST_NOEXEC:
        yield warning(
            "root-noexec",
            f"{host.config.root} is mounted noexec",
            "CNI plugins that execute a built-in plugin from this directory fail, such as flannel,"
            " which executes bridge",
            f"mount -o remount,exec {root}, or install the plugins into"
            f" {host.config.network.bin_dir}: pyrunc-cri install-node",
        )


def state(host: Machine) -> Iterator[CheckResult]:
    """Check that the state directory is on a tmpfs."""
    place = nearest(host.path(host.config.state))
    kind = file_system.file_system_type(place)
    if kind in TMPFS:
        yield fine("state-tmpfs", f"{host.config.state} is on {kind}")
    else:
        yield warning(
            "state-tmpfs",
            f"{host.config.state} is on {kind}, not on a tmpfs",
            "starts of containers wait for the disk, and the state outlives a reboot",
            f"mount -t tmpfs -o mode=0711 pyrunc {host.config.state}, before the server starts",
        )


def programs(host: Machine) -> Iterator[CheckResult]:
    """Check that nft, which the server executes, is installed."""
    if host.program("nft"):
        yield fine("nft", "the command nft is installed")
    else:
        yield wrong(
            "nft",
            "the command nft is missing",
            "pods cannot reach addresses outside the node, and host ports are refused",
            "apt install nftables",
        )


def nearest(path: Path) -> Path:
    """Return `path`, or the nearest existing folder above it."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
