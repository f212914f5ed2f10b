"""Tests images whose manifest, configuration, layers or diff ids have sha512 digests."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cri_server.images.archives.build import layer
from cri_server.images.formats import manifest as types
from cri_server.images.service import ImageService
from pyrunc.errors import PeerError
from tests.cri.images.conftest import texts, with_jobs
from tests.cri.images.test_pull import left_over
from tests.cri.images.trees import names
from tests.support.layer_threads import LayerThreads
from tests.support.registry import Registry

pytestmark = pytest.mark.usefixtures("each_store")

LAYERS = [layer({"top": "1", "one": "1"}), layer({"top": "2"})]
PARTS = ("manifest", "config", "layers", "diff ids")


def put(registry: Registry, *parts: str) -> tuple[str, str]:
    """Push an image whose `parts` have sha512 digests; return the digests of its configuration and
    of its manifest."""

    def algorithm(part: str) -> str:
        return "sha512" if part in parts else "sha256"

    def entry(data: bytes, part: str, media_type: str) -> dict[str, Any]:
        digest = registry.put_blob(data, algorithm(part))
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    kind = algorithm("diff ids")
    diff_ids = [f"{kind}:{hashlib.new(kind, data).hexdigest()}" for data in LAYERS]
    platform = types.host_platform()
    config = json.dumps(
        {
            "architecture": platform.architecture,
            "os": platform.os,
            "config": {"Cmd": ["/one"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    ).encode()
    document = {
        "schemaVersion": 2,
        "mediaType": types.OCI_MANIFEST,
        "config": entry(config, "config", types.OCI_CONFIG),
        "layers": [entry(data, "layers", types.OCI_LAYER) for data in LAYERS],
    }
    registry.algorithm = algorithm("manifest")
    digest = registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)
    return document["config"]["digest"], digest


@pytest.mark.parametrize("parts", [*((part,) for part in PARTS), PARTS], ids=" ".join)
async def test_an_image_with_sha512_digests_can_be_used(
    tmp_path: Path, registry: Registry, parts: tuple[str, ...]
) -> None:
    """The image is pulled by tag and by digest, found after a restart by each of its names and ids,
    saved, removed and loaded again."""
    identifier, digest = put(registry, *parts)
    name = f"{registry.host}/app"
    async with with_jobs(tmp_path) as service:
        assert await service.pull(f"{name}:v1") == identifier
        assert await service.pull(f"{name}@{digest}") == identifier
        tops = texts(await service.rootfs(identifier), "top")
        assert tops in (["2"], ["2", "1"])
        archive = b"".join([part async for part in service.save([f"{name}:v1"])])
    service = ImageService(tmp_path / "images", jobs=LayerThreads())
    await service.start()
    [listed] = await service.list()
    assert (listed.id, listed.repo_digests) == (identifier, [f"{name}@{digest}"])
    bare = identifier.rpartition(":")[2]
    for reference in (
        f"{name}:v1",
        f"{name}@{digest}",
        identifier,
        bare,
        bare[:12],
        identifier[:20],
    ):
        image = await service.status(reference)
        assert image is not None and image.id == identifier, reference
    registry.requests.clear()
    assert await service.pull(f"{name}:v1") == identifier
    assert [r.method for r in registry.requests] == ["HEAD", "GET"]
    assert await service.unused() == []
    await service.remove(identifier)
    assert left_over(tmp_path) == set() and names(tmp_path / "images/blobs/sha512") <= set()
    (tmp_path / "archive.tar").write_bytes(archive)
    [loaded] = await service.load(tmp_path / "archive.tar")
    assert loaded.id == identifier and texts(await service.rootfs(identifier), "top") == tops
    await service.close()


@pytest.mark.parametrize("part", PARTS)
async def test_content_with_another_digest_is_refused(
    tmp_path: Path, registry: Registry, service: ImageService, part: str
) -> None:
    """When a part of an image has the right size but another sha512 digest, the pull fails."""
    _, digest = put(registry, *PARTS)
    name = f"{registry.host}/app@{digest}"
    if part == "manifest":
        data, kind = registry.manifests["app", digest]
        registry.manifests["app", digest] = (data.replace(b'"size"', b'"sise"', 1), kind)
    elif part == "diff ids":
        [(data, kind)] = {registry.manifests["app", digest]}
        document = json.loads(data)
        document["layers"].reverse()
        name = f"{registry.host}/app@" + registry.put_manifest(
            "app:v2", json.dumps(document).encode(), kind
        )
    else:
        document = json.loads(registry.manifests["app", digest][0])
        wrong = document["config"] if part == "config" else document["layers"][0]
        registry.fault(f"GET .*{wrong['digest']}", content=b" " * wrong["size"])
    with pytest.raises(PeerError) as caught:
        await service.pull(name)
    assert re.search("sha512:|not JSON|sise", caught.value.message), caught.value.message
    assert await service.list() == [] and left_over(tmp_path) == set()
