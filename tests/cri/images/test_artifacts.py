"""Tests pulls of OCI artifacts, which are refused, and of images with layers that are not file
systems, which are ignored."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cri_server.images.archives.build import LayerFile, image, layer
from cri_server.images.formats import manifest as types
from cri_server.images.service import ImageService
from pyrunc.errors import PeerError, Unsupported
from tests.cri.images.conftest import texts
from tests.cri.images.test_pull import left_over
from tests.support.layer_threads import LayerThreads
from tests.support.oci_archives import descriptor, manifest_of
from tests.support.registry import Registry

pytestmark = pytest.mark.usefixtures("each_store")

OCI, EMPTY = types.OCI_CONFIG, "application/vnd.oci.empty.v1+json"
ARTIFACTS = [
    # who makes it, artifactType, the configuration's type, the layer's type, the type that the
    # error names
    (
        "Helm",
        "",
        "application/vnd.cncf.helm.config.v1+json",
        "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        2,
    ),
    ("cosign sign", "", OCI, "application/vnd.dev.cosign.simplesigning.v1+json", 3),
    (
        "cosign sign 3",
        "application/vnd.dev.sigstore.bundle.v0.3+json",
        EMPTY,
        "application/vnd.dev.sigstore.bundle.v0.3+json",
        1,
    ),
    ("cosign attach sbom", "", OCI, "text/spdx+json", 3),
    ("buildkit's attestations", "", OCI, "application/vnd.in-toto+json", 3),
    ("Notation", "application/vnd.cncf.notary.signature", EMPTY, "application/jose+json", 1),
    ("Notation 1.0", "", "application/vnd.cncf.notary.signature", "application/jose+json", 2),
    (
        "Flux",
        "",
        "application/vnd.cncf.flux.config.v1+json",
        "application/vnd.cncf.flux.content.v1.tar+gzip",
        2,
    ),
    ("ORAS 1.2", "application/vnd.unknown.artifact.v1", EMPTY, types.OCI_LAYER, 1),
    ("ORAS 1.0", "", "application/vnd.unknown.config.v1+json", types.OCI_LAYER, 2),
    ("Ollama", "", types.DOCKER_CONFIG, "application/vnd.ollama.image.model", 3),
    (
        "ModelPack",
        "application/vnd.cnai.model.manifest.v1+json",
        EMPTY,
        "application/vnd.cnai.model.weight.v1.raw",
        1,
    ),
    (
        "Singularity",
        "",
        "application/vnd.sylabs.sif.config.v1+json",
        "application/vnd.sylabs.sif.layer.v1.sif",
        2,
    ),
    (
        "Spin",
        "",
        "application/vnd.fermyon.spin.application.v1+config",
        "application/vnd.wasm.content.layer.v1+wasm",
        2,
    ),
    (
        "wasm-to-oci",
        "",
        "application/vnd.wasm.config.v1+json",
        "application/vnd.wasm.content.layer.v1+wasm",
        2,
    ),
    (
        "runwasi's oci-tar-builder",
        "",
        OCI,
        "application/vnd.bytecodealliance.wasm.component.layer.v0+wasm",
        3,
    ),
    ("wkg", "", "application/vnd.wasm.config.v0+json", "application/wasm", 2),
    (
        "docker compose publish",
        "application/vnd.docker.compose.project",
        EMPTY,
        "application/vnd.docker.compose.file+yaml",
        1,
    ),
    (
        "docker plugin push",
        "",
        "application/vnd.docker.plugin.v1+json",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        2,
    ),
    ("containerd's EROFS layers", "", OCI, "application/vnd.erofs.layer.v1", 3),
    ("an empty artifact", "", EMPTY, EMPTY, 3),
]


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda artifact: artifact[0])
async def test_the_error_of_an_artifact_names_its_type(
    tmp_path: Path,
    registry: Registry,
    service: ImageService,
    artifact: tuple[str, str, str, str, int],
) -> None:
    # Kubernetes lets the runtime decide what an image volume may be: containerd refuses artifacts,
    # too, CRI-O mounts them.
    _, artifact_type, config_type, layer_type, named = artifact
    content = b"content"
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": types.OCI_MANIFEST,
        "config": descriptor(b"{}", config_type),
        "layers": [descriptor(content, layer_type)],
    }
    if artifact_type:
        document["artifactType"] = artifact_type
    for blob in (b"{}", content):
        registry.put_blob(blob)
    registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    with pytest.raises(Unsupported) as caught:
        await service.pull(f"{registry.host}/app:v1")
    words = f"app:v1: an OCI artifact of type {artifact[named]!r}, not an image"
    assert words in caught.value.message
    assert left_over(tmp_path) == set() and registry.requested("/blobs/") == []


async def test_an_artifact_manifest_is_refused(registry: Registry, service: ImageService) -> None:
    # a media type of the release candidates of image specification 1.1
    kind = "application/vnd.oci.artifact.manifest.v1+json"
    document = {"mediaType": kind, "artifactType": "text/sbom", "blobs": []}
    registry.put_manifest("app:v1", json.dumps(document).encode(), kind)
    with pytest.raises(Unsupported, match="an OCI artifact of type 'text/sbom'"):
        await service.pull(f"{registry.host}/app:v1")


BUILT = image([layer({"top": "1", "one": "1"}), layer({"top": "2"})])
OTHERS = {
    "WebAssembly": {"mediaType": "application/vnd.wasm.content.layer.v1+wasm"},
    "an attestation": {
        "mediaType": "application/vnd.in-toto+json",
        "annotations": {"in-toto.io/predicate-type": "x"},
    },
    "a signature": {"mediaType": "application/vnd.dev.cosign.simplesigning.v1+json"},
    "by sha512": {"mediaType": "text/plain", "digest": "sha512:" + "0" * 128},
}


def put_with_others(registry: Registry, *others: dict[str, Any]) -> str:
    """Push the image BUILT with other blobs among its layers; return its reference."""
    data, blobs = manifest_of(BUILT)
    document = json.loads(data)
    first, second = document["layers"]
    added = [{**descriptor(b"no file system", "x"), **other} for other in others]
    document["layers"] = [added[0], first, *added[1:], second]
    for blob in (*blobs.values(), b"no file system"):
        registry.put_blob(blob)
    registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    return f"{registry.host}/app:v1"


async def test_layers_that_are_no_file_system_are_ignored(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """Such a layer is neither fetched nor stored. The image is found after a restart, and can be
    saved, loaded and pushed without the layer."""
    name = put_with_others(registry, *OTHERS.values())
    assert await service.pull(name) == BUILT.id
    unused = descriptor(b"no file system", "x")["digest"]
    assert registry.requested(f"GET .*blobs/{unused}") == []
    tops = texts(await service.rootfs(BUILT.id), "top")
    assert tops in (["2"], ["2", "1"])
    archive = b"".join([part async for part in service.save([name])])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert len([n for n in tar.getnames() if n.startswith("blobs/")]) == 4
    pushed = await service.push(name, f"{registry.host}/copy:v1", None, lambda progress: None)
    copy = json.loads(registry.manifests["copy", pushed][0])
    assert [entry["mediaType"] for entry in copy["layers"]] == [f"{types.OCI_LAYER}+gzip"] * 2
    await service.close()
    again = ImageService(tmp_path / "images", jobs=LayerThreads())
    await again.start()
    assert [i.id for i in await again.list()] == [BUILT.id]
    await again.remove(BUILT.id)
    (tmp_path / "archive.tar").write_bytes(archive)
    [loaded] = await again.load(tmp_path / "archive.tar")
    assert loaded.id == BUILT.id and texts(await again.rootfs(BUILT.id), "top") == tops
    await again.close()


async def test_only_layers_with_a_file_system_have_diff_ids(
    registry: Registry, service: ImageService
) -> None:
    """A pull fails if the configuration has a diff id for a layer that is no file system."""
    # nothing would tell which layer a diff id belongs to
    built = image([*BUILT.layers, b"no file system"])
    data, blobs = manifest_of(built)
    document = json.loads(data)
    document["layers"][2]["mediaType"] = "application/wasm"
    for blob in blobs.values():
        registry.put_blob(blob)
    registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    with pytest.raises(
        PeerError, match="2 layers and application/wasm, but the image configuration has 3 diff ids"
    ):
        await service.pull(f"{registry.host}/app:v1")


@pytest.mark.parametrize(
    "kind",
    [
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    ],
)
async def test_a_foreign_layer_comes_from_the_registry(
    registry: Registry, service: ImageService, kind: str
) -> None:
    """The URLs in the descriptor of a foreign layer are never used."""
    data, blobs = manifest_of(BUILT)
    document = json.loads(data)
    document["layers"][0] |= {"mediaType": kind, "urls": ["http://198.51.100.1/layer"]}
    for blob in blobs.values():
        registry.put_blob(blob)
    registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    assert await service.pull(f"{registry.host}/app:v1") == BUILT.id


@pytest.mark.parametrize(
    "kind",
    [
        types.OCI_CONFIG,
        types.DOCKER_CONFIG,
        "application/octet-stream",
        "application/json",
        "text/html",
    ],
)
async def test_old_media_types_of_a_configuration_are_accepted(
    registry: Registry, service: ImageService, kind: str
) -> None:
    # Docker Hub and other registries served configurations as octet-stream, JSON or HTML for years
    # (distribution 1621); docker accepts them, too.
    data, blobs = manifest_of(BUILT)
    document = json.loads(data)
    document["config"]["mediaType"] = kind
    for blob in blobs.values():
        registry.put_blob(blob)
    registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    assert await service.pull(f"{registry.host}/app:v1") == BUILT.id


async def test_an_archive_may_have_signatures_beside_the_image(
    tmp_path: Path, service: ImageService
) -> None:
    # `cosign save` writes such an archive: its index lists the image, signatures and attestations.
    data, blobs = manifest_of(BUILT)
    signature = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": types.OCI_MANIFEST,
            "config": descriptor(b"{}", OCI),
            "layers": [descriptor(b"payload", "application/vnd.dev.cosign.simplesigning.v1+json")],
        }
    ).encode()
    everything = [data, signature, b"{}", b"payload", *blobs.values()]
    entries = [
        {
            **descriptor(data, types.OCI_MANIFEST),
            "annotations": {"kind": "dev.cosignproject.cosign/image"},
        },
        {
            **descriptor(signature, types.OCI_MANIFEST),
            "annotations": {"kind": "dev.cosignproject.cosign/sigs"},
        },
    ]
    files = {
        f"blobs/sha256/{descriptor(blob, '')['digest'][7:]}": LayerFile(blob) for blob in everything
    }
    files["index.json"] = LayerFile(json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
    (tmp_path / "archive.tar").write_bytes(layer(files, parents=False))
    [loaded] = await service.load(tmp_path / "archive.tar", "signed:v1")
    assert loaded.id == BUILT.id and loaded.repo_tags == ["docker.io/library/signed:v1"]
