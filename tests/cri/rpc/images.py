"""Makes small images, and calls the image service: pull, status, list, remove."""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.server_harness import RPC_TIMEOUT_S, Server


def an_image(content: str = "x", **config: object) -> build.BuiltImage:
    """Return a small image with one file of this content."""
    return build.image([build.layer({"file": content})], {"Cmd": ["/file"], **config})


def pull(server: Server, name: str, **auth: str) -> str:
    """Pull an image; return its id."""
    request = api.PullImageRequest(image=api.ImageSpec(image=name), auth=api.AuthConfig(**auth))
    return str(server.image.PullImage(request, timeout=RPC_TIMEOUT_S).image_ref)


def image_status(server: Server, name: str) -> api.Image | None:
    """Return the status of an image; None for a missing one."""
    request = api.ImageStatusRequest(image=api.ImageSpec(image=name))
    answer = server.image.ImageStatus(request, timeout=RPC_TIMEOUT_S)
    return answer.image if answer.HasField("image") else None


def images(server: Server, name: str = "") -> list[api.Image]:
    """Return the images that ListImages reports, of one name or of all."""
    request = api.ListImagesRequest(filter=api.ImageFilter(image=api.ImageSpec(image=name)))
    return list(server.image.ListImages(request, timeout=RPC_TIMEOUT_S).images)


def remove(server: Server, name: str) -> None:
    """Remove an image."""
    request = api.RemoveImageRequest(image=api.ImageSpec(image=name))
    server.image.RemoveImage(request, timeout=RPC_TIMEOUT_S)
