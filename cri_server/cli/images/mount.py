"""`pyrunc-cri image mount` and `umount`: make an image's files readable at a folder, without a
container.

The command itself makes the mount, in the mount namespace in which the user runs it; the server
makes no mounts on the host. Needs root, and a server on this machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.containers.image_tree import open_image_tree
from pyrunc.abi.mount import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.mountinfo import MountPoint, mount_points

# An image of unknown origin must not grant privileges (setuid) or open devices.
ATTRIBUTES = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
KINDS = ("erofs", "overlay")

folder_argument = click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))


@click.command()
@click.argument("image", shell_complete=completion.images)
@folder_argument
@click.pass_obj
def mount(address: str, image: str, folder: Path) -> None:
    """Mount the files of IMAGE at FOLDER, read-only, until `image umount FOLDER`.

    The files of an image that the server has unpacked (`[images] store`) disappear when the image
    is removed or converted. The files of any other image stay readable."""
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is no directory")
    with Client(address) as client:
        tree = open_image_tree(client, image)
    with closing_fd(tree):
        kernel_mount.mount_setattr(tree, attr_set=ATTRIBUTES)
        kernel_mount.move_mount(tree, os.fspath(folder.absolute()))


@click.command()
@folder_argument
def umount(folder: Path) -> None:
    """Unmount an image that `image mount` has mounted at FOLDER."""
    path = os.path.realpath(folder)
    mounts = [each for each in mount_points() if each.path == path]
    if not mounts:
        raise WrongState(f"nothing is mounted at {folder}")
    if not _is_ours(mounts[-1]):
        raise WrongState(
            f"the mount at {folder} is not an image, but a {mounts[-1].kind} file system"
        )
    kernel_mount.umount2(path)


def _is_ours(each: MountPoint) -> bool:
    return each.kind in KINDS and bool(os.statvfs(each.path).f_flag & os.ST_RDONLY)
