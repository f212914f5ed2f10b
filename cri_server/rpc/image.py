"""The handlers of CRI's ImageService.

The runtime handler and the annotations of an ImageSpec do not change which image is pulled. So
`spec.runtime_handler` is empty both in the list of images and in the list of containers. A kubelet
with RuntimeClassInImageCriApi compares the fields of the two lists before it removes an image.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator

from cri_server.api import api_pb2 as api
from cri_server.config import handlers
from cri_server.images.model import AUTH_FIELDS, Auth
from cri_server.images.service import Image
from cri_server.observability import stats
from cri_server.rpc.runtime import batches
from cri_server.services import Services
from pyrunc.errors import InvalidArgument


def message(image: Image) -> api.Image:
    """Convert an image to its CRI message. The image's USER is set as either `uid` or
    `username`."""
    result = api.Image(
        id=image.id,
        repo_tags=image.repo_tags,
        repo_digests=image.repo_digests,
        # kubelet's client takes a size of 0 for an error: "Id or size of image is not set".
        size=max(1, image.size_bytes),
        username=image.username,
        pinned=image.pinned,
    )
    if image.uid is not None:
        result.uid.value = image.uid
    result.spec.image = image.id
    return result


class ImageHandlers:
    """The handlers of CRI's ImageService."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def ListImages(self, request: api.ListImagesRequest) -> api.ListImagesResponse:
        images = await self._services.images.list(request.filter.image.image or None)
        return api.ListImagesResponse(images=[message(i) for i in images])

    async def StreamImages(
        self, request: api.StreamImagesRequest
    ) -> AsyncIterator[api.StreamImagesResponse]:
        images = await self._services.images.list(request.filter.image.image or None)
        for batch in batches(images):
            yield api.StreamImagesResponse(images=[message(i) for i in batch])

    async def ImageStatus(self, request: api.ImageStatusRequest) -> api.ImageStatusResponse:
        response = api.ImageStatusResponse()
        image = await self._services.images.status(_reference(request.image))
        if image is not None:
            response.image.CopyFrom(message(image))
            if request.verbose:
                details = await self._services.images.details(image.id, request.image.image)
                response.info["info"] = json.dumps({"user": image.user, **details})
        return response

    async def PullImage(self, request: api.PullImageRequest) -> api.PullImageResponse:
        auth = Auth(**{name: getattr(request.auth, name) for name in AUTH_FIELDS})
        reference = _reference(request.image)
        handlers.require(self._services.config, request.image.runtime_handler)
        identifier = await self._services.images.pull(reference, None if auth.empty else auth)
        return api.PullImageResponse(image_ref=identifier)

    async def RemoveImage(self, request: api.RemoveImageRequest) -> None:
        await self._services.images.remove(_reference(request.image))

    async def ImageFsInfo(self, request: api.ImageFsInfoRequest) -> api.ImageFsInfoResponse:
        images, now_ns = self._services.images, time.time_ns()
        filesystem = api.FilesystemUsage(timestamp=now_ns)
        filesystem.fs_id.mountpoint = os.fspath(images.root)
        filesystem.used_bytes.value = max(1, images.usage().size_bytes)
        filesystem.inodes_used.value = max(1, images.usage().inodes)
        layers = api.FilesystemUsage(timestamp=now_ns, fs_id=filesystem.fs_id)
        containers = self._services.index.containers
        used, inodes = stats.layers.measured(stats.layer_roots(self._services, containers))
        layers.used_bytes.value, layers.inodes_used.value = used, inodes
        return api.ImageFsInfoResponse(
            image_filesystems=[filesystem], container_filesystems=[layers]
        )


def _reference(image: api.ImageSpec) -> str:
    if not image.image:
        raise InvalidArgument("image.image is empty")
    return str(image.image)
