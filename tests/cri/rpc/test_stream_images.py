"""StreamImages: the reply of ListImages in parts."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.images import an_image, images, pull, remove
from tests.cri.server_harness import Server
from tests.support.registry import Registry


@pytest.mark.requirement("10.4.1", "5.3.1")
def test_the_stream_has_the_items_of_the_list(server: Server, registry: Registry) -> None:
    registry.push("streamed/app:v1", an_image("streamed"))
    name = f"{registry.host}/streamed/app:v1"
    identifier = pull(server, name)
    assert streamed(server) == images(server) and identifier in {
        image.id for image in images(server)
    }
    assert [image.id for image in streamed(server, name)] == [identifier]
    assert streamed(server, "registry.test/none:1") == []
    remove(server, identifier)


def streamed(server: Server, name: str = "") -> list[api.Image]:
    request = api.StreamImagesRequest(filter=api.ImageFilter(image=api.ImageSpec(image=name)))
    parts = list(server.image.StreamImages(request, timeout=30))
    assert all(part.images for part in parts), "no part without an image"
    return [image for part in parts for image in part.images]
