"""PullImage: the returned id, logins, callers that disconnect, and errors. tests/cri/images has
more tests."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.rpc.images import an_image, image_status, images, pull, remove
from tests.cri.server_harness import Server, code_of, message_of
from tests.support.registry import Fault, Registry


@pytest.mark.requirement("1.b.7", "5.1.1", "5.1.3", "5.1.4")
def test_a_pull_by_tag_and_by_digest_returns_the_same_id(
    server: Server, registry: Registry
) -> None:
    """A container of the image reports the same id. If a reference has a tag and a digest, the
    digest decides."""
    digest = registry.push("ids/app:v1", an_image("ids"))
    registry.push("copied/app:latest", an_image("ids"))
    host = registry.host
    names = [
        f"{host}/ids/app:v1",
        f"{host}/ids/app@{digest}",
        f"{host}/ids/app:v7@{digest}",
        f"{host}/copied/app",
    ]
    (identifier,) = {pull(server, name) for name in names}
    image = image_status(server, identifier)
    assert image is not None and image.id == identifier
    container = server.create(
        server.run_pod(), server.container_config(image=api.ImageSpec(image=identifier))
    )
    assert server.status(container).image_id == server.containers()[0].image_id == identifier
    server.remove_container(container)
    remove(server, identifier)


@pytest.mark.requirement("5.1.4")
def test_equal_concurrent_pulls_fetch_an_image_once(server: Server, registry: Registry) -> None:
    registry.push("many/app:v1", an_image("many"))
    before = len(registry.requests)
    with ThreadPoolExecutor(8) as pool:
        pulled = set(pool.map(lambda _: pull(server, f"{registry.host}/many/app:v1"), range(8)))
    assert len(pulled) == 1
    blobs = [
        r.path for r in registry.requests[before:] if "/blobs/" in r.path and r.method == "GET"
    ]
    assert len(blobs) == len(set(blobs)) > 0, "each blob is fetched once"
    remove(server, pulled.pop())


@pytest.mark.requirement("1.a.11", "1.7")
def test_a_deadline_leaves_no_image(server: Server, registry: Registry) -> None:
    registry.push("slow/app:v1", an_image("slow"))
    registry.faults.append(Fault("GET .*/slow/app/blobs/", stall_at=1))
    name = f"{registry.host}/slow/app:v1"
    request = api.PullImageRequest(image=api.ImageSpec(image=name))
    try:
        code = code_of(lambda: server.image.PullImage(request, timeout=0.5))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert image_status(server, name) is None and not images(server, name)
    finally:
        registry.faults.clear()
    remove(server, pull(server, name))


@pytest.mark.requirement("5.1.2")
@pytest.mark.parametrize("way", ["name", "auth", "padded", "other server"])
def test_logins_of_all_forms_are_used(server: Server, registry: Registry, way: str) -> None:
    registry.push("private/app:v1", an_image("private"))
    token = base64.b64encode(b"user:secret").decode()
    auth = {
        "name": {"username": "user", "password": "secret"},
        "auth": {"auth": token},
        "padded": {"auth": base64.b64encode(b"user:secret\0\0").decode()},
        "other server": {"username": "user", "password": "secret", "server_address": "other.test"},
    }[way]
    registry.auth = ("basic", "user", "secret")
    try:
        name = f"{registry.host}/private/app:v1"
        assert "401" in message_of(lambda: pull(server, name))
        if way == "other server":
            assert "401" in message_of(lambda: pull(server, name, **auth)), (
                "the secret is not for this one"
            )
        else:
            remove(server, pull(server, name, **auth))
        assert "secret" not in server.log.read_text() and token not in server.log.read_text()
    finally:
        registry.auth = None


@pytest.mark.requirement("5.1.5")
def test_a_moved_tag_names_the_new_image(server: Server, registry: Registry) -> None:
    name = f"{registry.host}/moving/app"
    digest = registry.push("moving/app:v1", an_image("old"))
    old = pull(server, f"{name}:v1")
    registry.push("moving/app:v1", an_image("new"))
    new = pull(server, f"{name}:v1")
    assert old != new
    by_tag, by_id = image_status(server, f"{name}:v1"), image_status(server, old)
    assert by_tag is not None and by_tag.id == new
    assert (
        by_id is not None
        and not by_id.repo_tags
        and list(by_id.repo_digests) == [f"{name}@{digest}"]
    )
    remove(server, old)
    remove(server, new)


@pytest.mark.requirement("12.1", "5.1.6", "1.11")
def test_an_unreachable_registry_is_an_error(server: Server, registry: Registry) -> None:
    assert message_of(lambda: pull(server, "127.0.0.1:1/app:v1")).startswith("RegistryUnavailable")
    name = f"{registry.host}/none/app:v1"
    assert code_of(lambda: pull(server, name)) == grpc.StatusCode.NOT_FOUND
    assert name in message_of(lambda: pull(server, name))
