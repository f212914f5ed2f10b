"""Tests that only `convert` changes whether an image is unpacked or mounted, and a changed
configuration does not, because containers use the image's files."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from cri_server.images.archives.build import BuiltImage, image
from cri_server.images.erofs import probe
from cri_server.images.service import ImageService
from cri_server.images.store import store as stores
from cri_server.images.store.layer_files import LayerFiles
from pyrunc.errors import KernelError, ResourceExhausted
from tests.cri.images.conftest import texts
from tests.cri.images.test_erofs_store import layer_blobs, opened, pull_into, pulled, serve
from tests.cri.images.test_pull import make
from tests.cri.images.trees import names
from tests.support.oci_archives import oci_archive
from tests.support.registry import Registry

__all__ = ["opened"]

TOPS = {"unpacked": ["2", "1", "0"], "erofs": ["2"]}
STORES = pytest.mark.parametrize(
    ("before", "after"), [("unpacked", "erofs"), ("erofs", "unpacked")]
)


def folders(store: Path) -> dict[str, int]:
    return {
        folder: len(list((store / folder).iterdir())) for folder in ("layers", "tars", "indexes")
    }


MADE = {
    "unpacked": {"layers": 3, "tars": 0, "indexes": 0},
    "erofs": {"layers": 0, "tars": 3, "indexes": 1},
}


@STORES
async def test_stored_images_stay_and_are_not_fetched_again(
    tmp_path: Path, registry: Registry, opened: list[ImageService], before: str, after: str
) -> None:
    store, built = tmp_path / "images", make()
    name = await pull_into(opened, store, registry, built, store=before)
    for _ in range(2):
        service = await serve(opened, store, store=after)
        [listed] = await service.list()
        assert (listed.id, listed.repo_tags) == (built.id, [name])
        root = await service.rootfs(built.id)
        assert texts(root, "top") == TOPS[before] and folders(store) == MADE[before]
        registry.requests.clear()
        assert await service.pull(name) == built.id, "a second pull changes nothing"
        assert texts(root, "top") == TOPS[before] and folders(store) == MADE[before]
        assert [r.path.rpartition("/")[2] for r in registry.requested("/blobs/")] == [built.id]
        await service.close()


@STORES
async def test_an_image_is_converted_without_a_download(
    tmp_path: Path, registry: Registry, opened: list[ImageService], before: str, after: str
) -> None:
    store, built = tmp_path / "images", make()
    name = await pull_into(opened, store, registry, built, store=before)
    service = await serve(opened, store, store=after)
    registry.requests.clear()
    assert service.to_convert(built.id) == {"erofs": "mounted", "unpacked": "unpacked"}[after]
    assert await service.convert(built.id) and service.to_convert(built.id) == ""
    await service.close()
    for _ in range(2):
        [listed] = await service.list()
        assert (listed.id, listed.repo_tags) == (built.id, [name])
        assert texts(await service.rootfs(built.id), "top") == TOPS[after]
        if after == "erofs":
            assert folders(store) == MADE[after] and layer_blobs(store) == set()
        else:  # the conversion does not restore removed blobs
            assert folders(store) == {**MADE["unpacked"], "tars": 3}
        service = await serve(opened, store, store=after)
    assert registry.requests == []
    await service.remove(built.id)
    assert folders(store) == dict.fromkeys(MADE["erofs"], 0)


@STORES
async def test_an_image_in_use_is_not_converted(
    tmp_path: Path, registry: Registry, opened: list[ImageService], before: str, after: str
) -> None:
    """An image is not converted while a container uses it or is being created from it."""
    store, built, users = tmp_path / "images", make(), ["c1"]
    await pull_into(opened, store, registry, built, store=before)
    service = await serve(opened, store, store=after, in_use=lambda image_id: users)
    assert not await service.convert(built.id)
    users.clear()
    root = await service.rootfs(built.id, "c1")
    assert not await service.convert(built.id) and texts(root, "top") == TOPS[before]
    service.release("c1")
    assert await service.convert(built.id)
    assert texts(await service.rootfs(built.id), "top") == TOPS[after]


@STORES
async def test_an_image_that_comes_into_use_during_the_conversion_stays(
    tmp_path: Path,
    registry: Registry,
    opened: list[ImageService],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
) -> None:
    store, built = tmp_path / "images", make()
    await pull_into(opened, store, registry, built, store=before)
    calls = 0

    def in_use(image_id: str) -> list[str]:
        nonlocal calls
        calls += 1
        return ["c1"] if calls > 1 else []

    service = await serve(opened, store, store=after, in_use=in_use)
    assert not await service.convert(built.id)
    await service.close()
    service = await serve(opened, store, store=after)
    assert texts(await service.rootfs(built.id), "top") == TOPS[before]
    if before == "unpacked":
        assert folders(store) == MADE[before], "the unused files of the conversion are collected"


async def test_an_image_stays_when_the_disk_has_no_space_for_its_conversion(
    tmp_path: Path, registry: Registry, opened: list[ImageService], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, built = tmp_path / "images", make()
    await pull_into(opened, store, registry, built, store="unpacked")
    service = await serve(opened, store)

    def full(self: LayerFiles, folder: str, chain_id: str) -> None:
        raise ResourceExhausted("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(LayerFiles, "commit_index", full)
        with pytest.raises(ResourceExhausted, match="no space left"):
            await service.convert(built.id)
    assert texts(await service.rootfs(built.id), "top") == TOPS["unpacked"]
    assert await service.convert(built.id)


async def test_each_image_of_the_same_layers_keeps_its_form(
    tmp_path: Path, opened: list[ImageService]
) -> None:
    """When one image is unpacked and the other mounted, both stay so after restarts."""
    store, tars = tmp_path / "images", make().layers
    one, two = image(tars, {"Cmd": ["1"]}), image(tars, {"Cmd": ["2"]})

    async def load(kind: str, name: str, built: BuiltImage) -> None:
        service = await serve(opened, store, store=kind)
        archive = tmp_path / "archive.tar"
        archive.write_bytes(oci_archive({name: built}))
        await service.load(archive)
        await service.close()

    await load("unpacked", "x/one:1", one)
    await load("erofs", "x/two:1", two)
    for kind in ("erofs", "unpacked", "erofs"):
        service = await serve(opened, store, store=kind)
        assert texts(await service.rootfs(one.id), "top") == TOPS["unpacked"]
        assert texts(await service.rootfs(two.id), "top") == TOPS["erofs"]
        await service.close()
    service = await serve(opened, store)
    await service.remove(two.id)
    assert texts(await service.rootfs(one.id), "top") == TOPS["unpacked"]
    assert folders(store) == MADE["unpacked"]


async def test_two_concurrent_conversions_succeed(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    store, built = tmp_path / "images", make()
    await pull_into(opened, store, registry, built, store="unpacked")
    service = await serve(opened, store)
    assert await asyncio.gather(service.convert(built.id), service.convert(built.id)) == [
        True,
        True,
    ]
    assert folders(store) == MADE["erofs"] and names(store / "ingest") == set()


async def test_an_index_without_forms_is_read(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    """When index.json does not say whether an image is unpacked or mounted, the layers on the disk
    decide."""
    # other programs write such an index
    store, built = tmp_path / "images", make()
    await pull_into(opened, store, registry, built)
    for name in ("index.json", "names.json"):
        document = json.loads((store / name).read_text())
        assert [e["annotations"].pop("org.pyrunc.image.form") for e in document["manifests"]] == [
            "mounted"
        ]
        (store / name).write_text(json.dumps(document))
    service = await serve(opened, store)
    assert texts(await service.rootfs(built.id), "top") == TOPS["erofs"]


async def test_auto_mounts_only_where_containers_share_a_mount(
    tmp_path: Path,
    registry: Registry,
    opened: list[ImageService],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With `store = "auto"`, new images are unpacked if each container would have its own mount of
    an image. Images that are mounted already stay mounted."""
    # as on Linux 6.12
    caplog.set_level("INFO")
    store, built, more = tmp_path / "images", make(), make(seed=1)
    await pull_into(opened, store, registry, built)
    monkeypatch.setattr(stores, "sharing_obstacle", lambda: "each has its own")
    service = await serve(opened, store, store="auto")
    assert "images are unpacked and not mounted: each has its own" in caplog.text
    await pulled(service, registry, more)
    assert texts(await service.rootfs(built.id), "top") == TOPS["erofs"]
    assert texts(await service.rootfs(more.id), "top") == TOPS["unpacked"]
    service = await serve(opened, tmp_path / "told", store="erofs")
    await pulled(service, registry, more)
    assert texts(await service.rootfs(more.id), "top") == TOPS["erofs"]


def test_the_log_gives_the_reason_for_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(number: int) -> None:
        def open_image(image: object, mount: object) -> int:
            raise KernelError("fsconfig", "erofs", number)

        monkeypatch.setattr(probe, "open_image", open_image)

    for number, words in (
        # fsconfig(2)'s errors on such kernels
        (errno.ENODEV, "the kernel has no EROFS"),
        (errno.ENOTBLK, "only from block devices"),
        (errno.EIO, "fsconfig erofs: EIO"),
    ):
        refuse(number)
        assert words in probe.mount_obstacle(tmp_path)
    assert list(tmp_path.iterdir()) == []
