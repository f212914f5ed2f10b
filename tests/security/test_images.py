"""Attacks with images of one tenant on those of another: manifests, configurations and archives
that name content of other tenants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cri_server.checkpoints.names import ANNOTATIONS
from cri_server.containers.restore import holds_checkpoint
from cri_server.images.archives.build import BuiltImage, LayerFile, image, layer
from cri_server.images.formats import manifest as types
from cri_server.images.service import Auth, ImageService
from pyrunc.errors import Error, NotFound, PeerError
from tests.cri.images.conftest import each_store, impatient, service, texts
from tests.support.oci_archives import descriptor, manifest_of, oci_archive
from tests.support.registry import Registry

__all__ = ["each_store", "impatient", "service"]
pytestmark = pytest.mark.usefixtures("each_store", "impatient")

SECRET = image([layer({"secret": "the other tenant's", "base": "1"})], {"Env": ["TOKEN=secret"]})


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """Provide the registry of another tenant with a private image."""
    with Registry(tmp_path / "registry", auth=("basic", "user", "password")) as running:
        running.push("private/app:v1", SECRET)
        yield running


@pytest.fixture
def attacker(tmp_path: Path) -> Iterator[Registry]:
    """Provide the attacker's registry, which does not have the content of the private image."""
    with Registry(tmp_path / "attacker") as running:
        yield running


@pytest.fixture
async def node(service: ImageService, registry: Registry) -> ImageService:
    """Return an image service that has pulled the private image for another tenant."""
    await service.pull(
        f"{registry.host}/private/app:v1", Auth(username="user", password="password")
    )
    return service


def put_manifest(
    registry: Registry, config: dict[str, Any], layers: Sequence[dict[str, Any]]
) -> str:
    """Push a manifest with this configuration and these layers as `mine:v1`; return its
    reference."""
    document = {
        "schemaVersion": 2,
        "mediaType": types.OCI_MANIFEST,
        "config": config,
        "layers": layers,
    }
    registry.put_manifest("mine:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    return f"{registry.host}/mine:v1"


def private_manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(manifest_of(SECRET)[0])
    return manifest


def push_blob(registry: Registry, data: bytes, media_type: str) -> dict[str, Any]:
    registry.put_blob(data)
    return descriptor(data, media_type)


async def refused(node: ImageService, reference: str, kind: type[Error]) -> str:
    """Assert that the pull fails and that the node has only the private image under its own names;
    return the error."""
    with pytest.raises(kind) as caught:
        await node.pull(reference)
    [image] = await node.list()
    assert image.id == SECRET.id and all(
        "private" in name for name in image.repo_tags + image.repo_digests
    )
    return caught.value.message


@pytest.mark.parametrize("layers", ["the private image's", "junk"])
async def test_a_manifest_cannot_use_a_foreign_configuration(
    node: ImageService, attacker: Registry, layers: str
) -> None:
    """A manifest of the attacker's registry has the id of a private image, which every user sees in
    a pod's status, as its configuration. The node requests the configuration from that registry,
    which does not have it, and the pull fails."""
    document = private_manifest()
    if layers == "junk":
        document["layers"] = [push_blob(attacker, b"junk", types.OCI_LAYER)]
    reference = put_manifest(attacker, document["config"], document["layers"])
    assert "not found" in await refused(node, reference, NotFound)
    assert attacker.requested(f"blobs/{SECRET.id}")


async def test_a_manifest_cannot_use_a_foreign_layer_by_its_diff_id(
    node: ImageService, attacker: Registry
) -> None:
    """The attacker's configuration names the uncompressed digest of a private layer, which SBOMs
    publish, and the manifest has junk in its place. The node fetches the junk and refuses it, since
    it does not match the digest."""
    mine = image(SECRET.layers, {"Cmd": ["cat", "/secret"]})
    config = push_blob(attacker, mine.config, types.OCI_CONFIG)
    junk = push_blob(attacker, layer({"junk": "junk"}), types.OCI_LAYER)
    await refused(node, put_manifest(attacker, config, [junk]), PeerError)
    assert attacker.requested(f"blobs/{junk['digest']}")


async def test_a_foreign_blob_does_not_reveal_its_content(
    node: ImageService, attacker: Registry
) -> None:
    """A manifest names the blob of a private layer, and its configuration has a false uncompressed
    digest for it. The node fetches the blob and does not use its own copy, so that no error reveals
    the true digest."""
    mine = image([layer({"mine": "1"})])
    config = push_blob(attacker, mine.config, types.OCI_CONFIG)
    message = await refused(
        node, put_manifest(attacker, config, private_manifest()["layers"]), NotFound
    )
    [diff_id] = json.loads(SECRET.config)["rootfs"]["diff_ids"]
    # With the true digest a manifest could name the layer.
    assert diff_id not in message


async def test_the_digest_of_a_private_manifest_gives_no_access(
    node: ImageService, attacker: Registry
) -> None:
    """A pod's status shows the digest of a private manifest. Another registry that claims to have
    this manifest must serve its configuration, too; it cannot, and the pull fails."""
    data, _ = manifest_of(SECRET)
    attacker.put_manifest("mine:v1", data, types.OCI_MANIFEST)
    await refused(node, f"{attacker.host}/mine:v1", NotFound)
    [digest] = [r for _, r in attacker.manifests if r.startswith("sha256:")]
    await refused(node, f"{attacker.host}/mine@{digest}", NotFound)
    assert attacker.requested("GET .*/manifests/")


async def test_a_pull_of_a_stored_private_image_needs_credentials(
    node: ImageService, registry: Registry
) -> None:
    """Without credentials, a pull of a private image fails as unauthorized although the image is on
    the node."""
    # kubelet lets the runtime check whether a pod's credentials may pull an image of the node.
    assert "unauthorized" in await refused(node, f"{registry.host}/private/app:v1", PeerError)


@pytest.mark.parametrize("lacks", ["configuration", "layer", "manifest"])
async def test_an_archive_must_have_all_content_that_it_names(
    tmp_path: Path, node: ImageService, lacks: str
) -> None:
    """An archive names a private image of the node by its digests and lacks a part of the content.
    The archive is refused although the node has this part."""
    data, blobs = manifest_of(SECRET)
    missing = {
        "configuration": SECRET.id,
        "layer": next(digest for digest in blobs if digest != SECRET.id),
        "manifest": descriptor(data, "")["digest"],
    }[lacks]
    (tmp_path / "archive.tar").write_bytes(without_blob(SECRET, missing))
    with pytest.raises(Error, match=r"archive (has no blob|lacks layer)"):
        await node.load(tmp_path / "archive.tar")
    [image] = await node.list()
    assert "docker.io/library/mine:v1" not in image.repo_tags


def without_blob(built: BuiltImage, digest: str) -> bytes:
    """Return the image's archive without one of its blobs."""
    import io
    import tarfile

    files: dict[str, LayerFile] = {}
    with tarfile.open(fileobj=io.BytesIO(oci_archive({"docker.io/library/mine:v1": built}))) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            files[member.name] = LayerFile(file.read())
    del files["blobs/" + digest.replace(":", "/")]
    return layer(files, parents=False)


async def test_layers_of_a_legitimate_pull_are_shared(
    node: ImageService, attacker: Registry
) -> None:
    """When another registry serves manifest and configuration of an image that is on the node, its
    layers are not fetched again."""
    attacker.push("copied/app:v1", SECRET)
    assert await node.pull(f"{attacker.host}/copied/app:v1") == SECRET.id
    blobs = {request.path.rpartition("/")[2] for request in attacker.requested("/blobs/")}
    assert blobs == {SECRET.id}
    assert texts(await node.rootfs(SECRET.id), "secret") == ["the other tenant's"]


async def test_a_copy_with_a_checkpoints_annotation_does_not_affect_the_original(
    service: ImageService, registry: Registry, attacker: Registry
) -> None:
    """A copy of a public image has a checkpoint's annotation in its manifest and is pulled first;
    both have the same id. Only the copy is a checkpoint: the public image stays an ordinary
    image."""
    registry.auth = None
    data, _ = manifest_of(SECRET)
    attacker.push("copy:v1", SECRET)
    claim = {**json.loads(data), "annotations": {ANNOTATIONS[0]: "c"}}
    attacker.put_manifest("copy:v1", json.dumps(claim).encode(), types.OCI_MANIFEST)
    copy, public = f"{attacker.host}/copy:v1", f"{registry.host}/private/app:v1"

    def is_checkpoint(*references: str) -> bool:
        return all(map(holds_checkpoint, service.annotations(SECRET.id, references)))

    assert await service.pull(copy) == SECRET.id and is_checkpoint(SECRET.id)
    assert await service.pull(public) == SECRET.id
    # kubelet passes the id.
    for references in ((public,), (SECRET.id, public), (SECRET.id,), (SECRET.id, "nothing:v1")):
        assert not is_checkpoint(*references), references
    assert is_checkpoint(copy) and is_checkpoint(SECRET.id, copy)
