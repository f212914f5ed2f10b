"""ImageStatus: an image under each of its names, and the fields that kubelet uses."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.images import an_image, image_status, pull, remove
from tests.cri.server_harness import IMAGE, Server
from tests.support.registry import Registry


@pytest.mark.requirement("5.2.1", "13.3", "1.b.6")
def test_every_name_finds_the_same(server: Server, registry: Registry) -> None:
    digest = registry.push("named/app:v1", an_image("named"))
    name = f"{registry.host}/named/app"
    identifier = pull(server, f"{name}:v1")
    digits = identifier.removeprefix("sha256:")
    assert identifier == f"sha256:{digits}" and len(digits) == 64
    by_tag = image_status(server, f"{name}:v1")
    assert by_tag is not None and by_tag.id == identifier and by_tag.size > 0
    for other in (f"{name}@{digest}", identifier, digits, digits[:12]):
        assert image_status(server, other) == by_tag, other
    remove(server, identifier)


@pytest.mark.requirement("1.a.4", "5.2.1")
def test_a_missing_image_has_no_status(server: Server) -> None:
    assert image_status(server, "registry.test/none:1") is None
    assert image_status(server, "f" * 64) is None


@pytest.mark.requirement("5.2.2", "5.2.3")
@pytest.mark.parametrize(
    "user, uid, name",
    [
        ("1002", 1002, ""),
        ("1003:1004", 1003, ""),
        ("www-data", None, "www-data"),
        ("www-data:grp", None, "www-data"),
    ],
)
def test_a_status_has_the_images_user(
    server: Server, registry: Registry, user: str, uid: int | None, name: str
) -> None:
    registry.push("users/app:v1", an_image("users", User=user))
    identifier = pull(server, f"{registry.host}/users/app:v1")
    image = image_status(server, identifier)
    assert image is not None and image.username == name
    assert (image.uid.value if image.HasField("uid") else None) == uid
    remove(server, identifier)


@pytest.mark.requirement("5.2.2", "5.3.2")
def test_a_status_has_names_and_digests_as_pulled(server: Server, registry: Registry) -> None:
    """An image that was pulled by tag has a tag and a digest; one that was pulled by digest has
    only the digest."""
    digest = registry.push("both/app:v1", an_image("both"))
    name = f"{registry.host}/both/app"
    identifier = pull(server, f"{name}@{digest}")
    image = image_status(server, identifier)
    assert (
        image is not None
        and not image.repo_tags
        and list(image.repo_digests) == [f"{name}@{digest}"]
    )
    remove(server, identifier)
    pull(server, f"{name}:v1")
    image = image_status(server, identifier)
    assert image is not None
    assert (list(image.repo_tags), list(image.repo_digests)) == (
        [f"{name}:v1"],
        [f"{name}@{digest}"],
    )
    assert not image.pinned
    remove(server, identifier)


def test_verbose_has_the_images_configuration(server: Server) -> None:
    request = api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE), verbose=True)
    assert "FROM_IMAGE=yes" in "".join(server.image.ImageStatus(request, timeout=30).info.values())
