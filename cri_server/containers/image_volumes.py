"""Image volumes: a mount whose source is a local image's files, or a folder of them. Nothing is
pulled here."""

from __future__ import annotations

import asyncio
import os
import stat

from cri_server.images.merged import merged
from cri_server.images.service import Rootfs
from cri_server.services import Services
from cri_server.spec.mounts import OUR_MOUNTS, Asked
from pyrunc.errors import Error, InvalidArgument, KernelError, NotFound
from pyrunc.kernel import path as paths

OPAQUE = "trusted.overlay.opaque"
PREFIX = "ImageVolumeMountFailed"  # kubelet looks for this word


async def resolve(services: Services, wanted: list[Asked]) -> dict[str, Rootfs]:
    """Fill in the source of each image volume; container path -> image, which is the caller's to
    hold until a container is known to use it. Raises InvalidArgument, NotFound, all beginning with
    ImageVolumeMountFailed."""
    found = {}
    for mount in wanted:
        if mount.request.HasField("image") and mount.request.image.image:
            try:
                found[mount.request.container_path] = await _resolve(services, mount)
            except Error as error:
                raise type(error)(f"{PREFIX}: {error.message}") from None
    return found


async def _resolve(services: Services, mount: Asked) -> Rootfs:
    reference = mount.request.image.image
    image = await services.images.status(reference)
    if image is None:
        raise NotFound(f"image {reference[:200]!r} is not on this node")
    rootfs = await services.images.rootfs(image.id)
    layers = [str(p) for p in rootfs.lower_dirs]
    sub_path = mount.request.image_sub_path
    mount.source = f"{OUR_MOUNTS}image:{mount.destination}"
    if rootfs.mount is not None:
        folder = await asyncio.to_thread(_folder, rootfs.mount.fd, sub_path)
        mount.image = rootfs.mount.image.replace(folder=folder)
        return rootfs
    if sub_path:
        layers = await asyncio.to_thread(_folders, layers, sub_path)
    # a bind of it could be remounted writable: an overlay without `upperdir` cannot
    if len(layers) == 1:
        layers.append(services.images.lowest_layer)
    mount.layers = layers
    return rootfs


def _folder(root: int, sub_path: str) -> str:
    """The folder's path in the image without links; empty for the image itself. Raises
    InvalidArgument."""
    try:
        parts = paths.components(paths.resolve(root, sub_path)) if sub_path else []
        found = "/".join(parts)
        is_folder = stat.S_ISDIR(os.stat(found or ".", dir_fd=root, follow_symlinks=False).st_mode)
    except KernelError as error:
        raise InvalidArgument(f"image_sub_path {sub_path!r}: {os.strerror(error.errno)}") from None
    except OSError as error:
        raise InvalidArgument(f"image_sub_path {sub_path!r}: {error.strerror}") from None
    if not is_folder:
        raise InvalidArgument(f"image_sub_path {sub_path!r} is not a folder of the image")
    return found


def _folders(layers: list[str], sub_path: str) -> list[str]:
    """The folders, top first, whose overlay is what the image's overlay shows at `sub_path`. Links
    in the path are followed inside the image, from one layer into another where they lead there.
    Raises InvalidArgument.

    A layer adds its folder until one above hides what lies below: by an opaque folder, a whiteout
    or a file.
    """
    found = []
    try:
        with merged(layers) as root:
            parts = paths.components(paths.resolve(root, sub_path))
    except KernelError as error:
        raise InvalidArgument(f"image_sub_path {sub_path!r}: {os.strerror(error.errno)}") from None
    for layer in layers:
        folder, hides = _look(layer, parts)
        if folder:
            found.append(folder)
        if hides:
            break
    if not found:
        raise InvalidArgument(f"image_sub_path {sub_path!r} is not a folder of the image")
    return found


def _look(layer: str, parts: list[str]) -> tuple[str, bool]:
    """The real path of the folder in one layer (empty: not there), and whether the layer hides
    those below it."""
    here = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    hides = False
    try:
        for part in parts:
            try:
                mode = os.stat(part, dir_fd=here, follow_symlinks=False).st_mode
            except FileNotFoundError:
                return "", hides
            if not stat.S_ISDIR(mode):
                return "", True
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=here)
            os.close(here)
            here = below
            hides = hides or _opaque(here)
        return os.readlink(f"/proc/self/fd/{here}"), hides
    finally:
        os.close(here)


def _opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False
