"""`pyrunc-cri diff`: lists the differences between a container's writable layer and its image.

In the layer, a whiteout (character device 0:0) stands for a removed file. An opaque directory hides
the image's directory of the same name (Documentation/filesystems/overlayfs.rst). Needs root, and a
server on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

import click

from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client, UnsupportedCall
from cri_server.cli.containers.image_tree import open_image_tree
from cri_server.cli.output import formats, show
from cri_server.images.layers.trees import is_opaque, open_folder
from pyrunc.errors import KernelError, WrongState
from pyrunc.kernel.fd import closing_fd

ADDED, CHANGED, DELETED = "A", "C", "D"
NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # ELOOP: it is a symbolic link


@click.command()
@click.argument("container", shell_complete=completion.containers)
@click.pass_obj
def diff(address: str, container: str) -> None:
    """List the files that CONTAINER has added (A), changed (C) and deleted (D), as docker does.

    Files in volumes and other mounts are not listed; the mount points may be.
    """
    with Client(address) as client, contextlib.ExitStack() as stack:
        target = client.container(container)
        upper = client.container_info(target.id).get("writableLayer")
        if not isinstance(upper, str):
            raise UnsupportedCall("the server does not report where a container's files are")
        try:
            layer = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WrongState(
                f"container {container} has no writable layer on this machine"
            ) from None
        stack.enter_context(closing_fd(layer))
        image = stack.enter_context(closing_fd(open_image_tree(client, target.image_id)))
        for kind, path in changes(layer, image):
            formats.say(show.printable(f"{kind} /{os.fsdecode(path)}"))


def changes(upper: int, lower: int) -> Iterator[tuple[str, bytes]]:
    """Yield the differences between the writable layer `upper` and the image's tree `lower`, as
    (kind, path). A folder comes before its contents. Both arguments are descriptors.

    The container may run meanwhile. A folder that it removes may be left out. Raises KernelError,
    OSError."""
    pending = _below(upper, lower, b"", False)[::-1]
    while pending:
        change = pending.pop()
        yield change.kind, change.path
        if change.is_folder:
            pending += _below(upper, lower, change.path, change.hides)[::-1]


class LayerChange(NamedTuple):
    """A difference between the writable layer and the image. `hides`: whether an opaque directory
    at or above `path` hides the image's files there."""

    kind: str
    path: bytes
    is_folder: bool = False
    hides: bool = False


def _below(upper: int, lower: int, path: bytes, hides: bool) -> list[LayerChange]:
    """Return the differences in the folder `path`, sorted by name. `hides`: whether an opaque
    directory above `path` hides the image's files."""
    folder = _open(upper, path)
    if folder is None:
        return []
    changes_by_name: dict[bytes, LayerChange] = {}
    with closing_fd(folder):
        # An opaque folder hides all that the image has at this place (trusted.overlay.opaque).
        hides = hides or is_opaque(folder)
        in_image = _names(lower, path)
        for name in map(os.fsencode, os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                place = os.path.join(path, name)
                changes_by_name[name] = _change(place, status, name in in_image, hides)
    if hides:
        for name in in_image - changes_by_name.keys():
            changes_by_name[name] = LayerChange(DELETED, os.path.join(path, name))
    return [changes_by_name[name] for name in sorted(changes_by_name)]


def _change(path: bytes, status: os.stat_result, in_image: bool, hides: bool) -> LayerChange:
    # overlayfs marks a deleted file by a character device 0/0 (filesystems/overlayfs.rst,
    # "whiteouts").
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return LayerChange(DELETED, path)
    kind = CHANGED if in_image else ADDED
    return LayerChange(kind, path, stat.S_ISDIR(status.st_mode), hides)


def _names(root: int, path: bytes) -> set[bytes]:
    """Return the names in the folder `path` below `root`; an empty set if there is no such
    folder."""
    folder = _open(root, path)
    if folder is None:
        return set()
    with closing_fd(folder):
        return set(map(os.fsencode, os.listdir(folder)))


def _open(root: int, path: bytes) -> int | None:
    """Open the folder `path` below `root` and return its descriptor; None if there is no such
    folder."""
    try:
        return open_folder(root, path)
    except KernelError as error:
        if error.errno in NO_FOLDER:
            return None
        raise
