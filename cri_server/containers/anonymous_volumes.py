"""Makes the volumes that an image declares (VOLUME). Each is a folder on the host that belongs to
the container, holds a copy of the image's content, and is bind-mounted at the declared path.

The folders lie beside the writable layer and are removed with it. As under containerd, they are
writable even if the container's root is read-only. A requested mount, or a default mount such as
/sys/fs/cgroup, replaces the volume at the same path.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.images.reserve import Reserve
from cri_server.images.store.merged import merged
from cri_server.images.waiting import Abandoned
from cri_server.spec import path_length
from cri_server.spec.mounts import OWN_PLACES, MountRequest
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel import path as paths
from pyrunc.kernel.copy_tree import copy_tree
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.tree import remove_path, remove_tree

FOLDER = "volumes"
VOLUMES_LIMIT = 1000
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def declared(
    volume_paths: Sequence[str],
    requested: Sequence[MountRequest],
    root: Path,
    users: api.UserNamespace,
) -> list[MountRequest]:
    """Return a bind mount for each of the image's `volume_paths`, except where a requested or
    default mount has the same path. `root`: the container's folder.

    On disk the files have the owners of the image. If the pod has a user namespace (`users`), the
    mount maps the owners' ids into it. Raises InvalidArgument for a volume at the container's root,
    a path that is too long, or more than VOLUMES_LIMIT volumes.
    """
    occupied = OWN_PLACES | {mount.destination for mount in requested}
    volumes: dict[str, MountRequest] = {}
    for place in volume_paths:
        path_length.check(place, "a volume that the image declares")
        destination = paths.clean(place)
        if destination == "/":
            raise InvalidArgument(f"the image declares the volume {place!r}, which is the root")
        if destination not in occupied and destination not in volumes:
            request = api.Mount(
                container_path=destination, uidMappings=users.uids, gidMappings=users.gids
            )
            volumes[destination] = MountRequest(
                request, destination, str(root / FOLDER / str(len(volumes)))
            )
    if len(volumes) > VOLUMES_LIMIT:
        raise InvalidArgument(
            f"the image declares {len(volumes)} volumes; the limit is {VOLUMES_LIMIT}"
        )
    return list(volumes.values())


def fill(
    volumes: Sequence[MountRequest], layers: Sequence[Path], is_abandoned: Callable[[], bool]
) -> None:
    """Make the volumes' folders and copy the image's content into them. Sparse files stay sparse.
    Blocks. Raises Abandoned once `is_abandoned` returns true.

    Raises OSError, KernelError, InvalidArgument for a volume that is not a folder in the image, and
    ResourceExhausted before the copy uses the node's reserve of disk space.
    """
    if not volumes:
        return
    folder = posixpath.dirname(volumes[0].source)
    os.mkdir(folder, 0o700)
    with merged(layers) as image, closing_fd(os.open(folder, _DIRECTORY)) as fd:
        # An image of 427 bytes can hold a sparse file of 64 GiB.
        reserve = Reserve(fd, folder)

        def tick(size: int) -> None:
            if is_abandoned():
                raise Abandoned
            reserve.charge(size)

        for volume in volumes:
            os.mkdir(volume.source, 0o755)
            _fill(volume, image, tick)


def _fill(volume: MountRequest, image: int, tick: Callable[[int], None]) -> None:
    """Copy the image's files at `volume.destination` into the folder `volume.source`; do nothing if
    the image has no such path. `image`: a descriptor of the image's root. The path and its symbolic
    links are resolved inside this root, because the image determines both (CVE-2022-23648). `tick`
    is called regularly, and may raise."""
    try:
        source = paths.open_in_root(image, volume.destination, _DIRECTORY)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return
        if error.errno in _NOT_A_FOLDER:
            why = os.strerror(error.errno)
            raise InvalidArgument(f"the image's volume {volume.destination!r}: {why}") from None
        raise
    with (
        closing_fd(source),
        closing_fd(os.open(volume.source, _DIRECTORY | os.O_NOFOLLOW)) as target,
    ):
        copy_tree(source, target, tick)


def move_from_layer(volumes: Sequence[MountRequest], layer: Path) -> None:
    """Move the files at each volume's path in `layer` (a checkpoint's restored layer) into the
    volume. They replace the files that were copied from the image. Blocks. Raises OSError,
    KernelError."""
    with merged([layer]) as root:
        for volume in volumes:
            folder, _, name = volume.destination.lstrip("/").rpartition("/")
            try:
                parent = paths.open_beneath(root, folder or ".", _DIRECTORY)
            except KernelError as error:
                if error.errno in (errno.ENOENT, *_NOT_A_FOLDER):
                    continue
                raise
            with closing_fd(parent):
                _move_into(volume, parent, name)


def _move_into(volume: MountRequest, parent: int, name: str) -> None:
    try:
        source = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return
    with closing_fd(source):
        remove_path(volume.source)
        os.mkdir(volume.source, 0o755)
        with closing_fd(os.open(volume.source, _DIRECTORY | os.O_NOFOLLOW)) as target:
            copy_tree(source, target, Reserve(target, volume.source).charge)
    remove_tree(parent, name)
