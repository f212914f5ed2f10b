"""Image volumes: a mount whose source is a local image's unpacked tree, or a folder of it. Nothing is pulled here."""

from __future__ import annotations

import asyncio
import os

from cri_server.containers.spec.mounts import Asked
from cri_server.services import Services
from pyrunc.errors import Error, InvalidArgument, NotFound, Unsupported
from pyrunc.kernel import path as paths

PREFIX = "ImageVolumeMountFailed"  # kubelet looks for this word


async def resolve(services: Services, wanted: list[Asked]) -> dict[str, str]:
    """Fill in the source of each image volume; container path -> image id. Raises InvalidArgument, NotFound, Unsupported,
    all beginning with ImageVolumeMountFailed."""
    found = {}
    for mount in wanted:
        if mount.request.HasField("image") and mount.request.image.image:
            try:
                found[mount.request.container_path] = await _resolve(services, mount)
            except Error as error:
                raise type(error)(f"{PREFIX}: {error.message}") from None
    return found


async def _resolve(services: Services, mount: Asked) -> str:
    reference = mount.request.image.image
    image = await services.images.status(reference)
    if image is None:
        raise NotFound(f"image {reference[:200]!r} is not on this node")
    layers = [str(p) for p in (await services.images.rootfs(image.id)).lower_dirs]
    sub_path = mount.request.image_sub_path
    if len(layers) == 1:
        mount.source = await asyncio.to_thread(_beneath, layers[0], sub_path) if sub_path else layers[0]
    elif sub_path:
        raise Unsupported(f"image_sub_path {sub_path!r} of an image with {len(layers)} layers")
    else:
        mount.overlay_lower = layers
    return image.id


def _beneath(root: str, sub_path: str) -> str:
    """The real path of a folder inside the image; its symlinks are followed inside the image only."""
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            folder = paths.open_in_root(top, sub_path, os.O_PATH | os.O_DIRECTORY)
        except Error:
            raise InvalidArgument(f"image_sub_path {sub_path!r} is not a folder of the image") from None
        try:
            return os.readlink(f"/proc/self/fd/{folder}")
        finally:
            os.close(folder)
    finally:
        os.close(top)
