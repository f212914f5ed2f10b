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
    """Start the company's registry with a private image."""
    with Registry(tmp_path / "registry", auth=("basic", "user", "password")) as running:
        running.push("private/app:v1", SECRET)
        yield running


@pytest.fixture
def attacker(tmp_path: Path) -> Iterator[Registry]:
    """Start the attacker's registry, which does not have the content of the private image."""
    with Registry(tmp_path / "attacker") as running:
        yield running


@pytest.fixture
async def node(service: ImageService, registry: Registry) -> ImageService:
    """Return a node on which another tenant has pulled the private image."""
    await service.pull(
        f"{registry.host}/private/app:v1", Auth(username="user", password="password")
    )
    return service


def put_manifest(
    registry: Registry, config: dict[str, Any], layers: Sequence[dict[str, Any]]
) -> str:
    """Push a manifest of these descriptors as `mine:v1`; return the reference."""
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
    """Return the error of the refused pull; assert that the node has only the private image, under
    no other name."""
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
    """Every user who sees the pod knows the image id of a private image. A manifest of the
    attacker's registry names this id as its configuration: the node requests the configuration from
    that registry, which does not have it, so that no pod gets the files of the private image."""
    document = private_manifest()
    if layers == "junk":
        document["layers"] = [push_blob(attacker, b"junk", types.OCI_LAYER)]
    reference = put_manifest(attacker, document["config"], document["layers"])
    assert "not found" in await refused(node, reference, NotFound)
    assert attacker.requested(f"blobs/{SECRET.id}")


async def test_a_manifest_cannot_use_a_foreign_layer_by_its_diff_id(
    node: ImageService, attacker: Registry
) -> None:
    """A configuration of the attacker names the uncompressed digest of a private layer, which SBOMs
    publish, and the manifest has junk in its place: the node fetches the junk, which does not match
    the digest."""
    mine = image(SECRET.layers, {"Cmd": ["cat", "/secret"]})
    config = push_blob(attacker, mine.config, types.OCI_CONFIG)
    junk = push_blob(attacker, layer({"junk": "junk"}), types.OCI_LAYER)
    await refused(node, put_manifest(attacker, config, [junk]), PeerError)
    assert attacker.requested(f"blobs/{junk['digest']}")


async def test_a_foreign_blob_does_not_reveal_its_content(
    node: ImageService, attacker: Registry
) -> None:
    """A manifest names the blob of a private layer, and the image's configuration has a false
    uncompressed digest for it. The node fetches the blob and does not use its own copy: the error
    would otherwise reveal the true digest, by which the layer could be named."""
    mine = image([layer({"mine": "1"})])
    config = push_blob(attacker, mine.config, types.OCI_CONFIG)
    message = await refused(
        node, put_manifest(attacker, config, private_manifest()["layers"]), NotFound
    )
    [diff_id] = json.loads(SECRET.config)["rootfs"]["diff_ids"]
    assert diff_id not in message


async def test_the_digest_of_a_private_manifest_gives_no_access(
    node: ImageService, attacker: Registry
) -> None:
    """A pod's status shows the digest of its private manifest, which gives no access to the image:
    another registry that claims to have the manifest must serve its configuration, too."""
    data, _ = manifest_of(SECRET)
    attacker.put_manifest("mine:v1", data, types.OCI_MANIFEST)
    await refused(node, f"{attacker.host}/mine:v1", NotFound)
    [digest] = [r for _, r in attacker.manifests if r.startswith("sha256:")]
    await refused(node, f"{attacker.host}/mine@{digest}", NotFound)
    assert attacker.requested("GET .*/manifests/")


async def test_a_pull_of_a_stored_private_image_needs_credentials(
    node: ImageService, registry: Registry
) -> None:
    """kubelet lets the runtime check whether a pod's credentials may pull an image that is on the
    node: a pull without them fails."""
    assert "unauthorized" in await refused(node, f"{registry.host}/private/app:v1", PeerError)


@pytest.mark.parametrize("lacks", ["configuration", "layer", "manifest"])
async def test_an_archive_must_have_all_content_that_it_names(
    tmp_path: Path, node: ImageService, lacks: str
) -> None:
    """An archive names a private image of the node by its digests and lacks a part of its content:
    it is refused, although the node has this part."""
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
    """A registry that serves manifest and configuration has the image, so its layers are not
    fetched again."""
    attacker.push("copied/app:v1", SECRET)
    assert await node.pull(f"{attacker.host}/copied/app:v1") == SECRET.id
    blobs = {request.path.rpartition("/")[2] for request in attacker.requested("/blobs/")}
    assert blobs == {SECRET.id}
    assert texts(await node.rootfs(SECRET.id), "secret") == ["the other tenant's"]


async def test_a_copy_with_a_checkpoints_annotation_does_not_affect_the_original(
    service: ImageService, registry: Registry, attacker: Registry
) -> None:
    """A copy of a public image whose manifest has a checkpoint's annotation is pulled first. The
    image has one id under both names, but the public one stays an ordinary image, by its name and
    by the id that kubelet passes; only the copy is a checkpoint."""
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
    for references in ((public,), (SECRET.id, public), (SECRET.id,), (SECRET.id, "nothing:v1")):
        assert not is_checkpoint(*references), references
    assert is_checkpoint(copy) and is_checkpoint(SECRET.id, copy)
