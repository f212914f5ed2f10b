"""What an image declares as VOLUME: a folder of the container's own, with what the image has there,
bound at that place.

They lie beside the writable layer and go with it; they are writable in a container whose root is
not, as under containerd. A mount of the caller at the very place takes the volume's, and so does
one of every container, such as /sys/fs/cgroup.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.images.merged import merged
from cri_server.images.reserve import Reserve
from cri_server.images.waiting import Abandoned
from cri_server.spec import path_length
from cri_server.spec.mounts import OWN_PLACES, Asked
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel import path as paths
from pyrunc.kernel.copy_tree import copy_tree
from pyrunc.kernel.tree import remove_path, remove_tree

FOLDER = "volumes"
VOLUMES_LIMIT = 1000
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def declared(
    places: Sequence[str], wanted: Sequence[Asked], root: Path, users: api.UserNamespace
) -> list[Asked]:
    """A bind mount for each declared volume that nothing else takes the place of; `root` is the
    container's folder.

    The files have the image's owners on the disk; the mount maps them for a pod with `users` of its
    own. Raises InvalidArgument for a volume at the container's root.
    """
    taken = OWN_PLACES | {mount.destination for mount in wanted}
    found: dict[str, Asked] = {}
    for place in places:
        path_length.check(place, "a volume that the image declares")
        destination = paths.clean(place)
        if destination == "/":
            raise InvalidArgument(f"the image declares the volume {place!r}, which is the root")
        if destination not in taken and destination not in found:
            request = api.Mount(
                container_path=destination, uidMappings=users.uids, gidMappings=users.gids
            )
            found[destination] = Asked(request, destination, str(root / FOLDER / str(len(found))))
    if len(found) > VOLUMES_LIMIT:
        raise InvalidArgument(
            f"the image declares {len(found)} volumes; at most {VOLUMES_LIMIT} are made"
        )
    return list(found.values())


def fill(volumes: Sequence[Asked], layers: Sequence[Path], given_up: Callable[[], bool]) -> None:
    """Make the folders, with what the image of these layers has. Blocking, until `given_up` says
    so.

    The image decides how much is copied: holes are not, and the disk's reserve for the node stays.
    Raises InvalidArgument for what is no folder in the image, ResourceExhausted, Abandoned,
    OSError, KernelError.
    """
    if not volumes:
        return
    folder = posixpath.dirname(volumes[0].source)
    os.mkdir(folder, 0o700)
    with merged(layers) as image, _opened(folder) as fd:
        reserve = Reserve(fd, folder)

        def tick(size: int) -> None:
            if given_up():
                raise Abandoned
            reserve.charge(size)

        for volume in volumes:
            os.mkdir(volume.source, 0o755)
            _fill(volume, image, tick)


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    fd = os.open(folder, _DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(volume: Asked, image: int, tick: Callable[[int], None]) -> None:
    """The name is the image's, and so are the links in it: resolved inside the image
    (CVE-2022-23648)."""
    try:
        source = paths.open_in_root(image, volume.destination, _DIRECTORY)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return
        if error.errno in _NOT_A_FOLDER:
            why = os.strerror(error.errno)
            raise InvalidArgument(f"the image's volume {volume.destination!r}: {why}") from None
        raise
    try:
        target = os.open(volume.source, _DIRECTORY | os.O_NOFOLLOW)
        try:
            copy_tree(source, target, tick)
        finally:
            os.close(target)
    finally:
        os.close(source)


def take_from(volumes: Sequence[Asked], layer: Path) -> None:
    """Volumes of a container that is restored: what its layer has at their places moves there, in
    place of what the image has. Blocking. Raises OSError, KernelError."""
    with merged([layer]) as root:
        for volume in volumes:
            folder, _, name = volume.destination.lstrip("/").rpartition("/")
            try:
                parent = paths.open_beneath(root, folder or ".", _DIRECTORY)
            except KernelError as error:
                if error.errno in (errno.ENOENT, *_NOT_A_FOLDER):
                    continue
                raise
            try:
                _take(volume, parent, name)
            finally:
                os.close(parent)


def _take(volume: Asked, parent: int, name: str) -> None:
    try:
        source = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        remove_path(volume.source)
        os.mkdir(volume.source, 0o755)
        target = os.open(volume.source, _DIRECTORY | os.O_NOFOLLOW)
        try:
            copy_tree(source, target, Reserve(target, volume.source).charge)
        finally:
            os.close(target)
    finally:
        os.close(source)
    remove_tree(parent, name)
