"""Tests the store of mounted (EROFS) images: its files, pulls, archives, pushes and removals."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cri_server.images import service as services
from cri_server.images.archives.build import BuiltImage, directory, image, layer
from cri_server.images.service import ImageService
from cri_server.images.store import store as stores
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import Unsupported
from pyrunc.kernel import verity
from tests.cri.images.conftest import texts
from tests.cri.images.test_pull import make
from tests.cri.images.trees import names
from tests.support.layer_threads import LayerThreads
from tests.support.oci_archives import oci_archive
from tests.support.page_cache import cached_pages
from tests.support.registry import Registry


@pytest.fixture
async def opened() -> AsyncIterator[list[ImageService]]:
    """Return a list: the services that a test appends to it are closed at the end."""
    services: list[ImageService] = []
    yield services
    for service in services:
        await service.close()


async def serve(opened: list[ImageService], folder: Path, **options: Any) -> ImageService:
    service = ImageService(folder, jobs=LayerThreads(), **{"store": "erofs", **options})
    opened.append(service)
    await service.start()
    return service


async def pulled(service: ImageService, registry: Registry, built: BuiltImage) -> str:
    registry.push("team/app:v1", built)
    name = f"{registry.host}/team/app:v1"
    assert await service.pull(name) == built.id
    return name


async def pull_into(
    opened: list[ImageService], folder: Path, registry: Registry, built: BuiltImage, **options: Any
) -> str:
    """Pull the image into the store `folder`, close the store, and return the image's name."""
    name = await pulled(await serve(opened, folder, **options), registry, built)
    await opened.pop().close()
    return name


def layer_blobs(store: Path) -> set[str]:
    """Return the names of the store's blobs that are as large as a layer."""
    blobs = (store / "blobs/sha256").iterdir()
    return {path.name for path in blobs if path.stat().st_size > 50_000}


async def test_a_tar_takes_the_place_of_its_blob(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images"), make()
    name = await pulled(service, registry, built)
    assert layer_blobs(tmp_path / "images") == set()
    assert len(names(tmp_path / "images/tars")) == 3 and names(tmp_path / "images/layers") == set()
    registry.requests.clear()
    assert await service.pull(name) == built.id
    assert len(registry.requests) == 2, (
        "what is here is not fetched again, but for the configuration"
    )
    await service.remove(built.id)
    await service.close()
    for folder in ("tars", "indexes", "blobs/sha256", "ingest"):
        assert names(tmp_path / "images" / folder) == set()


async def test_blobs_are_stored_only_with_keep_blobs(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images", keep_blobs=True), make()
    await pulled(service, registry, built)
    assert len(layer_blobs(tmp_path / "images")) == 3
    again = await serve(opened, tmp_path / "images")
    assert layer_blobs(tmp_path / "images") == set(), "a server that is not to keep them drops them"
    assert texts(await again.rootfs(built.id), "top") == ["2"]


async def test_an_archive_has_plain_layers_and_the_same_image(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images"), make()
    name = await pulled(service, registry, built)
    archive = tmp_path / "archive.tar"
    with open(archive, "wb") as file:
        async for part in service.save([name]):
            file.write(part)
    for number, store in enumerate(("unpacked", "erofs")):
        other = await serve(opened, tmp_path / str(number), store=store)
        [loaded] = await other.load(archive)
        assert (loaded.id, loaded.repo_tags) == (built.id, [name])
        assert texts(await other.rootfs(built.id), "top")[0] == "2"


async def test_a_push_compresses_and_sends_missing_layers(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images"), make()
    name = await pulled(service, registry, built)
    digest = (await service.list())[0].repo_digests[0].partition("@")[2]
    same = await service.push(name, f"{registry.host}/team/app:v2", None, lambda progress: None)
    assert same == digest, "the registry has every blob of it"
    with Registry(tmp_path / "other") as other:
        target = f"{other.host}/copied/app:v1"
        assert await service.push(name, target, None, lambda progress: None) != digest
        assert layer_blobs(tmp_path / "images") == set()
        fresh = await serve(opened, tmp_path / "fresh", store="unpacked")
        assert await fresh.pull(target) == built.id
        assert texts(await fresh.rootfs(built.id), "top") == ["2", "1", "0"]


@pytest.mark.parametrize("setting", ["auto", "unpacked"])
async def test_a_kernel_that_cannot_mount_gets_layers_unpacked_from_their_tars(
    tmp_path: Path,
    registry: Registry,
    opened: list[ImageService],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
) -> None:
    """When a disk moves to a node whose kernel cannot mount images, the server unpacks the stored
    tars. When the disk moves back, the image is still listed."""
    service, built = await serve(opened, tmp_path / "images"), make()
    name = await pulled(service, registry, built)
    await service.close()
    with monkeypatch.context() as patch:
        patch.setattr(stores, "mount_obstacle", lambda folder: "no such kernel")
        for _ in range(2):
            other = await serve(opened, tmp_path / "images", store=setting)
            [listed] = await other.list()
            assert (listed.id, listed.repo_tags) == (built.id, [name])
            assert texts(await other.rootfs(built.id), "top") == ["2", "1", "0"]
            await other.close()
        levels = {record.getMessage(): record.levelname for record in caplog.records}
        assert (
            levels["images are unpacked, because they cannot be mounted here: no such kernel"]
            == "WARNING"
        )
        assert levels[f"image {name}: layers are missing; unpacking them again"] == "WARNING"
        with pytest.raises(Unsupported, match='no such kernel; store = "auto" unpacks them'):
            await serve(opened, tmp_path / "images", store="erofs")
    back = await serve(opened, tmp_path / "images")
    assert [listed.id for listed in await back.list()] == [built.id]


async def test_a_lost_index_is_built_again(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images"), make()
    await pulled(service, registry, built)
    await service.close()
    [index] = (tmp_path / "images/indexes").iterdir()
    content = index.read_bytes()
    index.unlink()
    again = await serve(opened, tmp_path / "images")
    assert texts(await again.rootfs(built.id), "top") == ["2"]
    assert index.read_bytes() == content, "the same layers give the same index"


async def test_an_image_whose_tar_is_lost_is_dropped(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images"), make()
    name = await pulled(service, registry, built)
    await service.close()
    next((tmp_path / "images/tars").iterdir()).unlink()
    again = await serve(opened, tmp_path / "images")
    assert await again.list() == []
    assert await again.pull(name) == built.id


async def test_images_with_the_same_layers_share_an_index(
    tmp_path: Path, opened: list[ImageService]
) -> None:
    service = await serve(opened, tmp_path / "images")
    layers = [layer({"a": "1", "d": directory()}), layer({"d/.wh..wh..opq": "", "d/b": "2"})]
    one, two = image(layers, {"Cmd": ["1"]}), image(layers, {"Cmd": ["2"]})
    (tmp_path / "archive.tar").write_bytes(oci_archive({"x/one:1": one, "x/two:1": two}))
    assert len(await service.load(tmp_path / "archive.tar")) == 2
    assert len(names(tmp_path / "images/indexes")) == 1
    first, second = await service.rootfs(one.id), await service.rootfs(two.id)
    assert first.mount is second.mount and names(first.lower_dirs[0]) == {"a", "d", "d/b"}
    await service.remove(one.id)
    assert (second.lower_dirs[0] / "d/b").read_text() == "2"
    await service.remove(two.id)
    assert names(tmp_path / "images/indexes") == set()
    assert json.loads((tmp_path / "images/index.json").read_text())["manifests"] == []


async def test_sealed_files_are_measured_at_each_mount(
    tmp_path: Path, registry: Registry, opened: list[ImageService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the fs-verity digest of a tar or an index differs from the stored one, the image is not
    mounted."""
    # The file system here may have no fs-verity; tests/vm/images uses one that has it.
    answers: dict[int, str] = {}
    monkeypatch.setattr(verity, "enable", lambda fd: True)
    monkeypatch.setattr(
        verity,
        "measure",
        lambda fd: answers.get(os.fstat(fd).st_ino, f"sha256:{os.fstat(fd).st_ino}"),
    )
    service, built = await serve(opened, tmp_path / "images"), make()
    await pulled(service, registry, built)
    assert len(names(tmp_path / "images/verity")) == 4, "three tars and an index"
    await service.close()
    service = await serve(opened, tmp_path / "images")
    assert texts(await service.rootfs(built.id), "top") == ["2"]
    await service.close()
    for folder in ("tars", "indexes"):
        path = next((tmp_path / "images" / folder).iterdir())
        answers = {path.stat().st_ino: "sha256:other"}
        service = await serve(opened, tmp_path / "images")
        with pytest.raises(DamagedRecord, match=f"{path.name} is not the file that was written"):
            await service.rootfs(built.id)
        await service.close()
    answers = {}
    service = await serve(opened, tmp_path / "images")
    await service.remove(built.id)
    assert names(tmp_path / "images/verity") == set()


async def test_read_file_data_is_in_memory_once(
    tmp_path: Path, registry: Registry, opened: list[ImageService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache has file data as pages of the mount only, not also as pages of the tars."""
    monkeypatch.setattr(services, "DROP_TAR_PAGES_S", 0.1)
    service, built = await serve(opened, tmp_path / "images"), make()
    await pulled(service, registry, built)
    (mount,) = await service.mounts([built.id])
    contents = [path.read_bytes() for path in mount.path.rglob("*") if path.is_file()]
    assert contents
    tars = [Path(device) for device in mount.image.devices]
    for _ in range(200):
        if not any(map(cached_pages, tars)):
            break
        await asyncio.sleep(0.1)
    assert [cached_pages(tar) for tar in tars] == [0] * len(tars)
    assert [path.read_bytes() for path in mount.path.rglob("*") if path.is_file()] == contents


async def test_a_newly_mounted_image_is_read_from_memory(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    """The server's first drop of cached pages after the mount keeps the pages that the pull wrote,
    for the first container. The second drop removes them."""
    service, built = await serve(opened, tmp_path / "images"), make()
    await pulled(service, registry, built)
    service._store.mounts.drop_tar_pages()
    (mount,) = await service.mounts([built.id])
    tars = [Path(device) for device in mount.image.devices]
    service._store.mounts.drop_tar_pages()
    assert any(map(cached_pages, tars))
    service._store.mounts.drop_tar_pages()
    assert not any(map(cached_pages, tars))


async def test_memory_and_disk_of_a_removed_image_are_freed(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    """The removal does not wait until the memory is free."""
    service, built = await serve(opened, tmp_path / "images"), make()
    await pulled(service, registry, built)
    rootfs = await service.rootfs(built.id)
    assert texts(rootfs, "top")
    del rootfs
    await service.remove(built.id)
    assert names(tmp_path / "images/tars") == set()
    await service._store.wait_deleted()
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)}
    assert [path for path in held if path.startswith(str(tmp_path / "images"))] == []
    assert service._store.mounts._dropped == []


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
