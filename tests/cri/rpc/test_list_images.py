"""ListImages: each image once, with all of its names."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.images import an_image, image_status, images, pull, remove
from tests.cri.server_harness import Server
from tests.support.registry import Registry


@pytest.mark.requirement("5.3.1", "13.6", "1.a.5")
def test_an_image_with_three_tags_is_listed_once(server: Server, registry: Registry) -> None:
    one = an_image("listed")
    name = f"{registry.host}/listed/app"
    for tag in "abc":
        registry.push(f"listed/app:{tag}", one)
        registry.push(f"listed/other:{tag}", an_image(f"other {tag}"))
    (identifier,) = {pull(server, f"{name}:{tag}") for tag in "abc"}
    others = [pull(server, f"{registry.host}/listed/other:{tag}") for tag in "abc"]
    listed = server.image.ListImages(api.ListImagesRequest(), timeout=30).images
    (only,) = [image for image in listed if image.id == identifier]
    assert sorted(only.repo_tags) == [f"{name}:{tag}" for tag in "abc"]
    assert len(set(others) & {image.id for image in listed}) == 3
    assert (
        images(server, f"{name}:b")
        == images(server, identifier)
        == [image_status(server, identifier)]
    )
    assert images(server, "registry.test/none:1") == []
    for each in (identifier, *others):
        remove(server, each)
