"""Images for the tests of the image service, and words that they speak to it with."""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.server_harness import RPC_TIMEOUT_S, Server


def an_image(content: str = "x", **config: object) -> build.BuiltImage:
    """Return a small image; other contents make another image."""
    return build.image([build.layer({"file": content})], {"Cmd": ["/file"], **config})


def pull(server: Server, name: str, **auth: str) -> str:
    """PullImage; the id."""
    request = api.PullImageRequest(image=api.ImageSpec(image=name), auth=api.AuthConfig(**auth))
    return str(server.image.PullImage(request, timeout=RPC_TIMEOUT_S).image_ref)


def image_status(server: Server, name: str) -> api.Image | None:
    """ImageStatus; None where there is none."""
    request = api.ImageStatusRequest(image=api.ImageSpec(image=name))
    answer = server.image.ImageStatus(request, timeout=RPC_TIMEOUT_S)
    return answer.image if answer.HasField("image") else None


def images(server: Server, name: str = "") -> list[api.Image]:
    """ListImages, with a filter where there is a name."""
    request = api.ListImagesRequest(filter=api.ImageFilter(image=api.ImageSpec(image=name)))
    return list(server.image.ListImages(request, timeout=RPC_TIMEOUT_S).images)


def remove(server: Server, name: str) -> None:
    """RemoveImage."""
    request = api.RemoveImageRequest(image=api.ImageSpec(image=name))
    server.image.RemoveImage(request, timeout=RPC_TIMEOUT_S)
