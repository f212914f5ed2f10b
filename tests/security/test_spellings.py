"""Attacks with other spellings of a registry's name, by which a tenant would evade the
administrator's rules for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.images.archives.build import image, layer
from cri_server.images.model import Auth
from cri_server.images.service import ImageService
from pyrunc.errors import PeerError
from tests.cri.images.conftest import each_store, impatient, service
from tests.cri.images.test_pull import hosts_toml
from tests.support.registry import Registry

__all__ = ["each_store", "impatient", "service"]
pytestmark = pytest.mark.usefixtures("each_store", "impatient")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        running.push("team/app:v1", image([layer({"file": "content"})]))
        yield running


def reject(tmp_path: Path, service: ImageService, scope: str) -> None:
    path = tmp_path / "policy.json"
    scopes = {scope: [{"type": "reject"}]}
    default = [{"type": "insecureAcceptAnything"}]
    path.write_text(json.dumps({"default": default, "transports": {"docker": scopes}}))
    service.policy = str(path)


@pytest.mark.parametrize(
    ("scope", "spellings"),
    [
        ("r.example/team", ["r.example", "R.Example", "r.example:443", "R.EXAMPLE:0443"]),
        (
            "docker.io/team",
            ["docker.io", "registry-1.docker.io", "Index.Docker.io", "docker.io:443"],
        ),
    ],
)
async def test_a_rejected_repository_is_rejected_under_every_spelling(
    tmp_path: Path, registry: Registry, service: ImageService, scope: str, spellings: list[str]
) -> None:
    """The policy rejects a repository. A tenant writes its registry in upper case, with its default
    port, or by another of its host names. Each pull is rejected, and the registry gets no
    request."""
    normal = scope.partition("/")[0]
    hosts_toml(tmp_path, normal, f'server = "{registry.url}"\n')
    reject(tmp_path, service, scope)
    for spelling in spellings:
        with pytest.raises(PeerError, match=r"^SignatureValidationFailed: .*rejected by"):
            await service.pull(f"{spelling}/team/app:v1")
    assert registry.requests == []
    reject(tmp_path, service, "other.example")
    for spelling in spellings:  # all of them reach the registry, by the same hosts.toml
        await service.pull(f"{spelling}/team/app:v1")


async def test_a_rejected_address_is_rejected_under_every_spelling(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """The policy rejects a registry whose name is an address. A tenant uses other spellings that
    inet_aton(3) accepts: each pull is rejected, and the registry gets no request."""
    host, _, port = registry.host.rpartition(":")
    assert host == "127.0.0.1"
    reject(tmp_path, service, registry.host)
    for address in (
        "127.0.0.1",
        "127.1",
        "0x7f.0.0.1",
        "2130706433",
        "017700000001",
        "[::ffff:7f00:1]",
    ):
        with pytest.raises(PeerError, match="rejected by"):
            await service.pull(f"{address}:{port}/team/app:v1")
    assert registry.requests == []


async def test_a_secret_follows_its_registry_not_the_spelling(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """A mirror that must not get pull secrets gets none, and the registry gets the secret, for each
    spelling of the image's name."""
    registry.auth = ("basic", "user", "password")
    with Registry(tmp_path / "mirror", auth=("basic", "user", "password")) as mirror:
        text = f'server = "{registry.url}"\n[host."{mirror.url}"]\npull_secrets = false\n'
        hosts_toml(tmp_path, "r.example", text)
        secret = Auth(
            username="user", password="password", server_address="https://R.example:443/v2/"
        )
        for spelling in ("r.example", "R.example", "r.example:443"):
            await service.pull(f"{spelling}/team/app:v1", secret)
        assert mirror.requests
        assert not any("authorization" in request.headers for request in mirror.requests)


async def test_names_keep_their_spelling(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """Lists show an image's name as it was pulled, because people and kubelet use it: only rules
    use the canonical form."""
    hosts_toml(tmp_path, "r.example", f'server = "{registry.url}"\n')
    await service.pull("R.example:443/team/app:v1")
    [image] = await service.list()
    assert image.repo_tags == ["R.example:443/team/app:v1"]
    assert await service.status("R.example:443/team/app:v1") is not None
