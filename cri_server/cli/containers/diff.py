"""`pyrunc-cri diff`: what a container has changed of its image's files, from its writable layer.

overlayfs has a removed file there as a character device 0:0, and marks a folder that hides the
image's as opaque (Documentation/filesystems/overlayfs.rst). Needs root, and a server on this
machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

import click

from cri_server.checkpoints.layer import is_opaque
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client, Unsupported
from cri_server.cli.images import mount
from cri_server.cli.observe import inspect
from cri_server.cli.output import formats, show
from cri_server.images.layers.trees import open_folder
from cri_server.images.store.places import Places
from pyrunc.errors import KernelError, WrongState

ADDED, CHANGED, DELETED = "A", "C", "D"
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # no folder, or a link in its place


@click.command()
@click.argument("container", shell_complete=completion.containers)
@click.pass_obj
def diff(address: str, container: str) -> None:
    """Show which files CONTAINER has added (A), changed (C) and deleted (D) of its image's, as
    docker does.

    Files in volumes and other mounts are not the container's; their places may be.
    """
    with Client(address) as client:
        found = client.container(container)
        upper = show.container_info(client, found.id).get("writableLayer")
        files = inspect.image(client, found.image_id, True).get("info", {}).get("files")
    if not isinstance(upper, str) or not isinstance(files, dict):
        raise Unsupported("the server does not tell where a container's files are")
    try:
        layer = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WrongState(f"container {container} has no writable layer on this machine") from None
    try:
        image = mount.open_tree(Places.of(files))
        try:
            for kind, path in changes(layer, image):
                formats.say(show.printable(f"{kind} /{os.fsdecode(path)}"))
        finally:
            os.close(image)
    finally:
        os.close(layer)


def changes(upper: int, lower: int) -> Iterator[tuple[str, bytes]]:
    """What the writable layer `upper` adds to, changes and deletes of the image's tree `lower`,
    both directories: kinds and paths, each folder before what is in it.

    The container may run meanwhile: a folder that it removes is left out. Raises KernelError,
    OSError.
    """
    pending = _below(upper, lower, b"", False)[::-1]
    while pending:
        change = pending.pop()
        yield change.kind, change.path
        if change.is_folder:
            pending += _below(upper, lower, change.path, change.hides)[::-1]


class Change(NamedTuple):
    """`hides`: a folder that shows nothing of what the image has at its place."""

    kind: str
    path: bytes
    is_folder: bool = False
    hides: bool = False


def _below(upper: int, lower: int, path: bytes, hides: bool) -> list[Change]:
    """The changes in one folder, sorted by name."""
    try:
        folder = open_folder(upper, path)
    except KernelError as error:
        if error.errno in GONE:
            return []
        raise
    try:
        hides = hides or is_opaque(f"/proc/self/fd/{folder}")
        in_image = _names(lower, path)
        found: dict[bytes, Change] = {}
        for name in map(os.fsencode, os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                found[name] = _change(os.path.join(path, name), status, name in in_image, hides)
        if hides:
            found |= {
                name: Change(DELETED, os.path.join(path, name)) for name in in_image - found.keys()
            }
    finally:
        os.close(folder)
    return [found[name] for name in sorted(found)]


def _change(path: bytes, status: os.stat_result, in_image: bool, hides: bool) -> Change:
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return Change(DELETED, path)
    kind = CHANGED if in_image else ADDED
    return Change(kind, path, stat.S_ISDIR(status.st_mode), hides)


def _names(root: int, path: bytes) -> set[bytes]:
    """What is in a folder of the image; nothing where it has none."""
    try:
        folder = open_folder(root, path)
    except KernelError as error:
        if error.errno in GONE:
            return set()
        raise
    try:
        return set(map(os.fsencode, os.listdir(folder)))
    finally:
        os.close(folder)
