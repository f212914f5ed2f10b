"""Resolves image volumes: mounts whose source is a local image, or a folder in it. Missing images
are not pulled."""

from __future__ import annotations

import asyncio
import os
import stat

from cri_server.images.layers.trees import is_opaque
from cri_server.images.store.merged import merged
from cri_server.services import Services
from cri_server.spec.mounts import OUR_MOUNTS, MountRequest
from pyrunc.errors import Error, InvalidArgument, KernelError, NotFound
from pyrunc.kernel import path as paths

PREFIX = "ImageVolumeMountFailed"  # kubelet matches this word


async def resolve(
    services: Services, container_id: str, mounts: list[MountRequest]
) -> dict[str, str]:
    """Set the source of each image volume in `mounts`; return the images' ids by container path.
    The images count as used by the container `container_id` until `ImageService.release`.

    Raises InvalidArgument, NotFound, with messages that begin with ImageVolumeMountFailed.
    """
    images = {}
    for mount in mounts:
        if mount.request.HasField("image") and mount.request.image.image:
            try:
                images[mount.request.container_path] = await _resolve(services, container_id, mount)
            except Error as error:
                raise type(error)(f"{PREFIX}: {error.message}") from None
    return images


async def _resolve(services: Services, container_id: str, mount: MountRequest) -> str:
    reference = mount.request.image.image
    image = await services.images.status(reference)
    if image is None:
        raise NotFound(f"image {reference[:200]!r} is not on this node")
    rootfs = await services.images.rootfs(image.id, container_id)
    layers = [str(p) for p in rootfs.lower_dirs]
    sub_path = mount.request.image_sub_path
    mount.source = f"{OUR_MOUNTS}image:{mount.destination}"
    if rootfs.mount is not None:
        folder = await asyncio.to_thread(_folder, rootfs.mount.fd, sub_path)
        mount.image = rootfs.mount.image.replace(folder=folder)
        return image.id
    if sub_path:
        layers = await asyncio.to_thread(_folders, layers, sub_path)
    # A single layer gets an empty second one, because an overlay needs two. A bind mount of the
    # layer could be remounted writable; an overlay without `upperdir` cannot.
    if len(layers) == 1:
        layers.append(services.images.lowest_layer)
    # The layers reach the kernel as a list (`lowerdir+`). If they were joined with colons, a sub
    # path `a:/etc` would make a folder of the host a layer of the volume.
    mount.layers = layers
    return image.id


def _folder(root: int, sub_path: str) -> str:
    """Return `sub_path` with its symlinks resolved inside the image; empty for the image's root.
    Raises InvalidArgument."""
    try:
        parts = paths.components(paths.resolve(root, sub_path)) if sub_path else []
        folder = "/".join(parts)
        is_folder = stat.S_ISDIR(os.stat(folder or ".", dir_fd=root, follow_symlinks=False).st_mode)
    except (KernelError, OSError) as error:
        reason = os.strerror(error.errno or 0)
        raise InvalidArgument(f"image_sub_path {sub_path!r}: {reason}") from None
    if not is_folder:
        raise InvalidArgument(f"image_sub_path {sub_path!r} is not a folder of the image")
    return folder


def _folders(layers: list[str], sub_path: str) -> list[str]:
    """Return the host paths of the folder `sub_path` in the image's layers, top first. They can be
    mounted as the layers of an overlay. Layers without the folder, and layers below one that hides
    it, are left out. Symbolic links in the path are followed inside the image, also across layers.
    Raises InvalidArgument."""
    folders = []
    try:
        with merged(layers) as root:
            parts = paths.components(paths.resolve(root, sub_path))
    except KernelError as error:
        raise InvalidArgument(f"image_sub_path {sub_path!r}: {os.strerror(error.errno)}") from None
    for layer in layers:
        folder, hides = _folder_in_layer(layer, parts)
        if folder:
            folders.append(folder)
        if hides:
            break
    if not folders:
        raise InvalidArgument(f"image_sub_path {sub_path!r} is not a folder of the image")
    return folders


def _folder_in_layer(layer: str, parts: list[str]) -> tuple[str, bool]:
    """Return the folder's host path in one layer ("" if it has no such folder), and whether the
    layer hides the folders of the layers below. `parts`: the components of the folder's path,
    without symbolic links."""
    folder = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    hides = False
    try:
        for part in parts:
            try:
                mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
            except FileNotFoundError:
                return "", hides
            if not stat.S_ISDIR(mode):
                return "", True
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = below
            hides = hides or is_opaque(folder)
        return os.readlink(f"/proc/self/fd/{folder}"), hides
    finally:
        os.close(folder)
