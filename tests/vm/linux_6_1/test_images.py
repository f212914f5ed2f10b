"""Tests images on Linux 6.1, which mounts no EROFS from files: they are unpacked, and so are images
that a server on a newer kernel has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.images.service import ImageService
from cri_server.images.store import store as stores
from pyrunc.errors import Unsupported
from tests.cri.images.conftest import registry, texts
from tests.cri.images.test_erofs_store import opened, pulled, serve
from tests.cri.images.test_pull import make
from tests.cri.images.trees import names
from tests.support.registry import Registry

__all__ = ["opened", "registry"]


async def test_auto_unpacks_images_on_linux_6_1(
    tmp_path: Path, registry: Registry, opened: list[ImageService]
) -> None:
    service, built = await serve(opened, tmp_path / "images", store="auto"), make()
    await pulled(service, registry, built)
    root = await service.rootfs(built.id)
    assert not root.mount and texts(root, "top") == ["2", "1", "0"]
    assert names(tmp_path / "images/tars") == names(tmp_path / "images/indexes") == set()
    assert len(list((tmp_path / "images/layers").iterdir())) == len(built.layers)


async def test_a_server_with_erofs_does_not_start(
    tmp_path: Path, opened: list[ImageService]
) -> None:
    with pytest.raises(
        Unsupported, match=r'images cannot be mounted here: .*store = "auto" unpacks them'
    ):
        await serve(opened, tmp_path / "images", store="erofs")


async def test_images_of_a_newer_kernel_are_unpacked(
    tmp_path: Path, registry: Registry, opened: list[ImageService], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # The test only pretends that the kernel could mount them; tars and indexes are real.
        patch.setattr(stores, "mount_obstacle", lambda folder: "")
        newer, built = await serve(opened, tmp_path / "images"), make()
        name = await pulled(newer, registry, built)
        await newer.close()
    assert len(names(tmp_path / "images/tars")) == 3
    service = await serve(opened, tmp_path / "images", store="auto")
    [image] = await service.list()
    assert (image.id, image.repo_tags) == (built.id, [name])
    assert texts(await service.rootfs(built.id), "top") == ["2", "1", "0"]
